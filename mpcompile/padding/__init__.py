"""Which dimensions Tensor Cores want padded, and how the padding travels."""
