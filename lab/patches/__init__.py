"""Write a patch for a queue, and carry a queue over to another release: `python -m lab.patches new | rebase`."""
