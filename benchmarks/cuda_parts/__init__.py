"""What the two CUDA devices for machines without a GPU share.

`fakecuda` exists by name only and counts; `emucuda` computes, on the host. Both are a C++ library
that is loaded before torch, one device on one stream, with the answers of a data sheet.

| part           | what                                                                    |
|----------------|-------------------------------------------------------------------------|
| `build`        | makes the library, once for each torch and source                       |
| `one_device.h` | the guard, the hooks, which kernel attention takes                      |
| `properties`   | what `torch.cuda.get_device_properties` tells                           |
| `inductor`     | what Inductor and Triton ask of a GPU before they generate code for it  |
| `transposes`   | what cuDNN, or torch, copies around a convolution                       |

`build` does not import torch, which must come after the library.
"""
