"""How does a head draft and the target verify? One loop for every scheme."""
