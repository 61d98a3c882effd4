"""What devices can do. All other rooms ask `registry.capabilities(device)`; none compares names.

`capabilities` defines the questions, `cpu` and `cuda` answer them; `tensor_cores` and `gpus` hold
facts from data sheets; `registry` lists the device types.
"""
