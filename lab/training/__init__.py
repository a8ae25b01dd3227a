"""The recipe of the trained tiny model: texts, dialogues, tokens, model, training. See docs/concepts/tiny-model.md."""
