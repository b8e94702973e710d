"""Heads as other tools write them: what each layout is called, holds and means."""
