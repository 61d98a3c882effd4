"""Which dimensions Tensor Cores want padded, and which operators keep padding."""
