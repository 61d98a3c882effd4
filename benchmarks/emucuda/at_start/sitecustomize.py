"""Python imports this when it starts, where the folder is on its path.

`__main__.py` puts it there. So each Python that a test starts sees the GPU, too.
"""

import os
import sys
import traceback

if "EMUCUDA" in os.environ:
    try:
        from benchmarks import emucuda
        from benchmarks.emucuda.inductor import has_triton, let_inductor_in

        _device = emucuda.become(os.environ["EMUCUDA"])
        if has_triton():
            let_inductor_in(_device)
    except Exception:  # Python would go on, and its tests be skipped, without a GPU
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
