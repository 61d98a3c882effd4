"""What the host asks of a GPU in one step, counted on an emulated one: `benchmarks/emucuda/`.

make emulated
"""

from __future__ import annotations

import pytest
from emulated import EMULATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="about the emulated GPU: make emulated"),
]


def test_fewer_launches_than_the_peer_and_no_wait() -> None:
    from benchmarks.emucuda.host_calls import ARMS, counted, launches

    arms = {arm.name: arm for arm in ARMS}
    peer = counted(arms["compile + autocast + GradScaler"], 4)
    ours = counted(arms["mpcompile O2, MPOptimizer"], 4)
    plain = counted(arms["mpcompile O2"], 4)
    assert launches(ours) < launches(peer)
    assert ours["waits"] == 0
    # Without an MPOptimizer the host asks, once, whether the step is to be skipped.
    assert plain["waits"] == 1
