"""Growth by a model on the device that computes it: for draft workers, and for drafters inside a target worker."""
