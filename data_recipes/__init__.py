"""Where do training rows come from? Prompts, answers, features, packed batches."""
