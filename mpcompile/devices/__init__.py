"""What devices can do. All other rooms ask `registry.capabilities(device)`; none compares names.

`capabilities` defines the questions, `cpu` and `cuda` answer them; `gpus` holds facts from data
sheets; `registry` lists the device types.
"""
