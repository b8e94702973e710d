"""How is a head fitted? DeepSpeed engine, batches, checkpoints, validation."""
