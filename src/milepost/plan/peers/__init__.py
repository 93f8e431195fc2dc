"""What vLLM and SGLang would do with a hybrid model: the same arithmetic as theirs, over the sizes of our own layout.

The law kept here: planned = allocated (law 9). A state's and a token's bytes are read off the layout, never counted twice;
each rule taken from a peer names the version and the file that it was read in.
"""

from milepost.plan.peers.figures import Flag
from milepost.plan.peers.sglang import SglangPlan, plan_sglang
from milepost.plan.peers.vllm import VllmPlan, inflated_block, plan_vllm
from milepost.plan.peers.vllm_mode import Mode, VllmMode

__all__ = ["Flag", "Mode", "SglangPlan", "VllmMode", "VllmPlan", "inflated_block", "plan_sglang", "plan_vllm"]
