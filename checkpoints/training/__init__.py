"""Training of the bundled demo model: corpus, tokenizer, steps, measures, recipe.

Needs the `train` extra; nothing else in the project imports it.
"""
