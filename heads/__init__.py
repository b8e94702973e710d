"""What is a draft head? Families, the target they draft for, alignment, vocabulary and losses."""
