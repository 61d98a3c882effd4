"""What is true of parameters between calls: loss scales, working copies, stored gradients."""
