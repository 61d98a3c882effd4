"""Other tools: `torch.export`, and trainers of libraries, of which each module imports its own."""
