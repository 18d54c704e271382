"""Training heads that draft: texts by the target itself, EAGLE-3's recipe, and what `phloem train-drafter` does."""
