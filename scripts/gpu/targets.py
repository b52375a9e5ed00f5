"""GPUs that kernels are compiled for on a machine that has none.

Owns what a compiler must be told of a device that it can not ask. The numbers are of NVIDIA's data
sheets and of the table of compute capabilities in the CUDA C++ programming guide.
"""

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU as a compiler sees it."""

    arch: str  # as ptxas names it
    device_kind: str
    capability: tuple[int, int]
    num_sms: int
    fpus_per_sm: int
    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, the most that a kernel may ask for
    l2_bytes: int
    clock_ghz: float
    bytes_per_second: int
    memory_bytes: int

    @property
    def config(self) -> str:
        """XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.num_sms}
              fpus_per_core: {self.fpus_per_sm}
              clock_rate_ghz: {self.clock_ghz}
              memory_bandwidth: {self.bytes_per_second}
              device_memory_size: {self.memory_bytes}
              l2_cache_size: {self.l2_bytes}
              shared_memory_per_core: {self.shared_per_sm}
              shared_memory_per_block: {48 * KIB}
              shared_memory_per_block_optin: {self.shared_per_block}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
            platform_name: "CUDA"
            device_description_str: "{self.device_kind}"
        """


_A100 = Target(
    arch="sm_80",
    device_kind="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    num_sms=108,
    fpus_per_sm=64,
    shared_per_sm=164 * KIB,
    shared_per_block=163 * KIB,
    l2_bytes=40 * KIB**2,
    clock_ghz=1.41,
    bytes_per_second=2_039_000_000_000,
    memory_bytes=80 * 10**9,
)
_H200 = Target(
    arch="sm_90a",
    device_kind="NVIDIA H200",
    capability=(9, 0),
    num_sms=132,
    fpus_per_sm=128,
    shared_per_sm=228 * KIB,
    shared_per_block=227 * KIB,
    l2_bytes=50 * KIB**2,
    clock_ghz=1.98,
    bytes_per_second=4_800_000_000_000,
    memory_bytes=141 * 10**9,
)
TARGETS = {target.arch: target for target in (_A100, _H200)}
