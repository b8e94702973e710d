"""What a user sees of an evaluation: a table in the terminal and one self-contained page."""
