"""draftsmith: train, measure and ship the draft heads of speculative decoding."""
