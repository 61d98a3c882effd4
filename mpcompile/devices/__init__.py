"""What devices can do. Every other room asks `registry.capabilities(device)`, none compares names.

`capabilities` has the questions, `cpu` and `cuda` the answers; `instructions`, `tensor_cores` and
`gpus` hold what data sheets say; `registry` lists the device types.
"""
