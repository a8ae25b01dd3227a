"""The laboratory: measurements of the project itself, training of the tiny checkpoint, upstream checks."""
