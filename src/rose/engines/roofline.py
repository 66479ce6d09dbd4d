"""Profiles of accelerators by arithmetic: what a step must compute, read and exchange, over what the device can do.

Peak figures are the vendor's; the reachable fractions are assumptions, stated beside them and repeated in every profile
made from them. Nothing here was measured: use these profiles to compare policies, not to promise latencies.
`rose plan` makes its profiles here; a few ship as files:

    python -m rose.engines.roofline      writes the files in `src/rose/engines/profiles` anew
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.engines.profiles import FOLDER, StepProfile, write_profile

BYTES_PER_VALUE = 2  # bf16, for weights, activations and KV alike
BLOCK_TOKENS = 16  # what vLLM uses on GPUs
MAX_CONTEXT_TOKENS = 32_768  # of all models here; some have longer ones


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: the vendor's peaks, and the share of each that a good engine reaches (assumed)."""

    name: str
    compute_flops: float
    memory_bytes_s: float
    memory_bytes: float
    link_bytes_s: float  # one direction; the vendor's NVLink figure counts both
    compute_share: float = 0.55  # model FLOPs of large dense prefills over the dense bf16 peak
    memory_share: float = 0.75  # decode kernels streaming weights and KV
    link_share: float = 0.75  # bus bandwidth of all-reduce over NVLink
    usable_memory_share: float = 0.90  # vLLM's default for --gpu-memory-utilization
    workspace_bytes: float = 2e9  # activations, CUDA graphs, the runtime's context
    host_s: float = 0.0015  # planning, launching and sampling of one step, with CUDA graphs
    exchange_latency_s: float = 10e-6  # one small all-reduce among a few devices
    memory_kind: str = "HBM3"
    link_kind: str = "NVLink"

    @property
    def short_name(self) -> str:
        return self.name.split()[0].lower()

    @property
    def usable_memory_bytes(self) -> float:
        return self.memory_bytes * self.usable_memory_share - self.workspace_bytes


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A dense decoder with gated FFN and untied embeddings, as in its public config.json."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Matrices only; norms and biases are less than 0.01 % of these models."""
        return self.layer_parameters + 2 * self.head_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_PER_VALUE

    @property
    def weights_bytes(self) -> int:
        return self.parameters * BYTES_PER_VALUE


H800 = Accelerator("H800 SXM", compute_flops=989e12, memory_bytes_s=3.35e12, memory_bytes=80e9, link_bytes_s=200e9)
H100 = Accelerator("H100 SXM", compute_flops=989e12, memory_bytes_s=3.35e12, memory_bytes=80e9, link_bytes_s=450e9)
A100 = Accelerator(
    "A100 SXM 80 GB", compute_flops=312e12, memory_bytes_s=2.039e12, memory_bytes=80e9, link_bytes_s=300e9,
    memory_kind="HBM2e",
)  # fmt: skip
H20 = Accelerator("H20 SXM", compute_flops=148e12, memory_bytes_s=4.0e12, memory_bytes=96e9, link_bytes_s=450e9)
L40S = Accelerator(
    "L40S PCIe", compute_flops=362e12, memory_bytes_s=864e9, memory_bytes=48e9, link_bytes_s=32e9,
    memory_kind="GDDR6", link_kind="PCIe",
)  # fmt: skip
ACCELERATORS = {device.short_name: device for device in (H800, H100, A100, H20, L40S)}

QWEN3_8B = DenseModel("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 151_936)
QWEN25_7B = DenseModel("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18_944, 152_064)
QWEN3_32B = DenseModel("Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 151_936)
QWEN25_32B = DenseModel("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27_648, 152_064)

QWEN3_14B = DenseModel("Qwen3-14B", 40, 5120, 40, 8, 128, 17_408, 151_936)
QWEN25_14B = DenseModel("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13_824, 152_064)
QWEN25_72B = DenseModel("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29_568, 152_064)
LLAMA31_8B = DenseModel("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256)
LLAMA31_70B = DenseModel("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28_672, 128_256)
MODELS = {
    model.name.lower(): model
    for model in (
        QWEN25_7B, QWEN25_14B, QWEN25_32B, QWEN25_72B, QWEN3_8B, QWEN3_14B, QWEN3_32B, LLAMA31_8B, LLAMA31_70B,
    )
}  # fmt: skip

SHIPPED = ((QWEN3_8B, 1), (QWEN25_7B, 1), (QWEN3_32B, 4), (QWEN25_32B, 4))


def roofline(device: Accelerator, model: DenseModel, tensor_parallel: int) -> StepProfile:
    """The profile of `tensor_parallel` such devices that run one model together."""
    flops = device.compute_flops * device.compute_share * tensor_parallel
    read_bytes_s = device.memory_bytes_s * device.memory_share * tensor_parallel
    exchanges = 2 * model.layers if tensor_parallel > 1 else 0
    ring = 2 * (tensor_parallel - 1) / tensor_parallel
    exchange_bytes = exchanges * ring * model.hidden * BYTES_PER_VALUE
    return StepProfile(
        name=f"{device.short_name}-{model.name.lower()}",
        what=f"{model.name} in bf16 on {tensor_parallel} x {device.name}, by roofline; not measured",
        shape="roofline",
        fixed_s=_round(device.host_s + exchanges * device.exchange_latency_s),
        per_new_token_s=_round(2 * model.layer_parameters / flops),
        per_kv_read_token_s=_round(model.kv_bytes_per_token / read_bytes_s),
        per_new_by_context_s=_round(4 * model.layers * model.heads * model.head_size / flops),
        per_sequence_s=_round(2 * model.head_parameters / flops),
        weights_read_s=_round((model.layer_parameters + model.head_parameters) * BYTES_PER_VALUE / read_bytes_s),
        per_new_token_exchange_s=_round(exchange_bytes / (device.link_bytes_s * device.link_share)),
        tensor_parallel=tensor_parallel,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_memory_bytes=_kv_memory_bytes(device, model, tensor_parallel),
        block_tokens=BLOCK_TOKENS,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        source=_sources(device, model, tensor_parallel),
    )


def _kv_memory_bytes(device: Accelerator, model: DenseModel, tensor_parallel: int) -> int:
    return int(device.usable_memory_bytes * tensor_parallel - model.weights_bytes)


def _sources(device: Accelerator, model: DenseModel, tensor_parallel: int) -> dict[str, str]:
    compute = f"{device.compute_flops / 1e12:g} TFLOPS dense bf16 (vendor) x {device.compute_share} reachable (assumed)"
    memory_tb_s, link_gb_s = device.memory_bytes_s / 1e12, device.link_bytes_s / 1e9
    memory = f"{memory_tb_s:g} TB/s {device.memory_kind} (vendor) x {device.memory_share} reachable (assumed)"
    link = f"{link_gb_s:g} GB/s per direction ({2 * link_gb_s:g} GB/s {device.link_kind}, vendor)"
    latency_us, host_ms = device.exchange_latency_s * 1e6, device.host_s * 1e3
    used_share, workspace_gb = device.usable_memory_share, device.workspace_bytes / 1e9
    group = f"divided by a tensor-parallel degree of {tensor_parallel}"
    return {
        "method": "roofline: fixed + exchange + max(compute, memory); generated by rose.engines.roofline",
        "model": f"public config.json of {model.name}: {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads}/{model.kv_heads} heads x {model.head_size}, ffn {model.ffn}, vocabulary {model.vocabulary}, "
        f"untied; {model.parameters / 1e9:.2f}B parameters in matrices, bf16",
        "fixed_s": f"host work {host_ms:g} ms per step (assumed, CUDA graphs) + two all-reduces per layer at "
        f"{latency_us:g} us each (assumed) where the degree is above 1",
        "per_new_token_s": f"2 FLOP per layer parameter over {compute}, {group}",
        "per_new_by_context_s": f"4 x layers x heads x head size FLOP over {compute}, {group}",
        "per_sequence_s": f"lm_head of one sampled token, 2 FLOP per parameter, over {compute}, {group}",
        "weights_read_s": f"bytes of layers and lm_head over {memory}, {group}",
        "per_kv_read_token_s": f"kv_bytes_per_token over {memory}, {group}",
        "per_new_token_exchange_s": f"two ring all-reduces of the hidden state per layer over {link} x "
        f"{device.link_share} reachable (assumed); 0 for one device",
        "kv_memory_bytes": f"{device.memory_bytes / 1e9:g} GB x {used_share} - {workspace_gb:g} GB workspace "
        f"(both assumed), times {tensor_parallel} devices, minus the weights",
        "max_context_tokens": "native context of the model, without RoPE scaling",
    }


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def main() -> None:
    for model, tensor_parallel in SHIPPED:
        profile = roofline(H800, model, tensor_parallel)
        write_profile(profile, FOLDER / f"{profile.name}.json")
        print(f"{profile.name}: {profile.what}")


if __name__ == "__main__":
    main()
