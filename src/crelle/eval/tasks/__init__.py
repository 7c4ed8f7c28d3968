"""Zero-shot tasks: accuracy with its standard error, item by item, resumable.

spec.py            a task's description, a small YAML beside its data (piqa.yaml, … here are the built-in ones)
items.py           the lines of its data as prompts, endings and right answers
loglikelihood.py   log-likelihoods of endings, in batches
harness.py         the requests of another harness (lm-eval), which cuts off what does not fit
journal.py         the results of items on disk, for a run that goes on where another stopped
scoring.py         a model on a task
paired.py          two models on the same items: difference, standard error, p-value
"""
