"""Private parts of the model plugin `transformers`."""
