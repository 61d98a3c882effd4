"""The private names of torch that mpcompile takes, by what can't do without them.

Read in torch 2.14. What is private on an object, such as `Tensor._version`, is read by the
functions of the other files of this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .private_names import Part, gone, needed_for

# -- graphs, operators and fake tensors ------------------------------------------------------------

with needed_for(Part.COMPILE):
    from torch._dispatch.python import enable_python_dispatcher  # keeps sizes symbolic
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils import _pytree as pytree  # nests of tuples, lists and dicts
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode
    from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod

with needed_for(Part.OPTIMIZER):
    from torch.utils._python_dispatch import _disable_current_modes as modes_off

with needed_for(Part.SAY):
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

# -- autograd and autocast -------------------------------------------------------------------------

with needed_for(Part.COMPILE):
    from torch._C import DisableTorchFunction as torch_functions_off

    # `torch.autocast(device_type, enabled=False)` turns off one device type's, and takes longer.
    from torch._C import _current_graph_task_id as running_backward  # as torch.utils.checkpoint
    from torch._C import _DisableAutocast as autocast_off
    from torch._C import _get_tracing_state as torchscript_trace
    from torch._C import _is_any_autocast_enabled as autocast_is_on
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
    from torch._C._autograd import _get_data_attr as GET_DATA  # type: ignore[attr-defined]
    from torch._C._autograd import _saved_tensors_hooks_disable as forbid_saved_hooks
    from torch._C._autograd import _saved_tensors_hooks_enable as allow_saved_hooks
    from torch._C._autograd import (
        _saved_tensors_hooks_get_disabled_error_message as saved_hooks_forbidden,
    )
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_hooks
    from torch.amp.autocast_mode import _enter_autocast as enter_autocast
    from torch.amp.autocast_mode import _exit_autocast as exit_autocast

with needed_for(Part.OPTIMIZER):
    from torch._C import _will_engine_execute_node as will_run  # whether a gradient is stored

with needed_for(Part.RECURRENT):
    from torch._C import _AutoDispatchBelowAutograd as below_autograd

with needed_for(Part.SAY):
    from torch._C import _current_autograd_node as current_node

# -- tensors ---------------------------------------------------------------------------------------

with needed_for(Part.COMPILE):
    from torch import _check as check
    from torch import _foreach_copy_ as copy_all
    from torch import _foreach_mul_ as multiply_all
    from torch import _foreach_norm as norm_of_each
    from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead
    from torch._prims_common import suggest_memory_format

with needed_for(Part.OPTIMIZER):
    from torch._C import _storage_Use_Count as use_count
    from torch._C._dynamo.guards import TensorGuards  # compares many tensors at once
    from torch.optim.optimizer import _global_optimizer_post_hooks as step_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as step_pre_hooks

# Gradients that torch's old `vmap` batches: `torch.autograd.grad(is_grads_batched=True)`.
with needed_for(Part.SAY):
    from torch import _add_batch_dim as batched
    from torch import _remove_batch_dim as unbatched
    from torch._C import _dispatch_keys as dispatch_keys
    from torch._C import _vmapmode_decrement_nesting as leave_batch
    from torch._C import _vmapmode_increment_nesting as enter_batch

# -- several processes -----------------------------------------------------------------------------

with needed_for(Part.RANKS):
    from torch.distributed._composable_state import _get_module_state as engine_of

    # Each module that an engine has taken charge of -> a weak reference to the engine's state.
    from torch.distributed._composable_state import _module_state_mapping as engine_states
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

# -- Dynamo ----------------------------------------------------------------------------------------

with needed_for(Part.COMPILE):
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.callback import CallbackArgs, callback_handler
    from torch._dynamo.convert_frame import compile_lock  # held while Dynamo compiles
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list as cache_entries
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        RestartAnalysis,
        TensorifyScalarRestartAnalysis,
    )
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.symbolic_convert import tls  # knows what is traced
    from torch._dynamo.trace_rules import get_mod_inlinelist  # lists torch's own files
    from torch._dynamo.utils import get_metrics_context
    from torch._dynamo.variables import UnspecializedNNModuleVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

with needed_for(Part.WHOLE_STEP):
    from torch._dynamo import graph_break
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import (
        ConstantVariable,
        TensorVariable,
        UserFunctionVariable,
        builder,
        torch_function,
    )
    from torch._dynamo.variables.functions import FunctoolsPartialVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable

with needed_for(Part.OPTIMIZER):
    from torch._subclasses import meta_utils

with needed_for(Part.EXPLAIN):
    from torch._dynamo.eval_frame import cached_backends
    from torch._dynamo.exc import TorchRuntimeError
    from torch._dynamo.pgo import get_code_state  # knows which sizes are dynamic
    from torch._dynamo.utils import counters

with needed_for(Part.SAY):
    from torch._dynamo.utils import get_compilation_metrics
    from torch._logging._internal import trace_structured

# -- AOTAutograd and Inductor ----------------------------------------------------------------------

with needed_for(Part.COMPILE):
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop  # runs a graph operator by operator
    from torch._functorch.config import patch as aot_settings
    from torch._functorch.partitioners import min_cut_rematerialization_partition

with needed_for(Part.INDUCTOR):
    from torch import _TorchCompileInductorWrapper as InductorBackend
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.compile_fx import compile_fx_inner as compile_inner
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.custom_graph_pass import (
        CustomGraphPass,
        CustomPartitionerFn,
        get_hash_for_files,
    )
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._ordered_set import OrderedSet

    # From 2.13 on, the caches want passes over the scheduler's nodes to be of a class of their own.
    try:
        from torch._inductor.custom_graph_pass import CustomSchedulerPass
    except ImportError:
        CustomSchedulerPass = CustomGraphPass  # type: ignore[assignment, misc]

with needed_for(Part.SAY):
    from torch._dynamo.repro.after_aot import save_graph_repro

if not TYPE_CHECKING:
    __getattr__ = gone
