"""The TransferQueue's back-ends."""
