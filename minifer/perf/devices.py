"""What the makers say their chips do: peak arithmetic, bandwidth and memory, with source and date.

These are ceilings from data sheets, not measurements. Vendors often quote twice the dense rate
("with sparsity"); the rates here are dense, and a note says where a maker does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Device:
    """One chip. Decimal units: 1 TB/s = 1e12 bytes a second.

    peak_flops: dense FLOP/s of 16-bit products (bfloat16; float16 where a chip has no bfloat16).
    memory_bandwidth: bytes/s of the memory the weights live in. memory_bytes: its capacity.
    on_chip_bytes: the largest memory on the chip that all cores share: a GPU's L2 cache, the SRAM
    of a chip that has nothing else. power_watts: of one chip at full load.
    num_sms: streaming multiprocessors, for chips that have them; its source stands in the note.
    source, date: where the figures come from; year-month of its publication.
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    memory_bytes: float
    on_chip_bytes: float
    power_watts: float
    source: str
    date: str
    note: str = ""
    num_sms: int | None = None

    @property
    def ridge_point(self) -> float:
        """FLOPs a byte from which arithmetic, not memory, is the limit: peak ÷ bandwidth.

        Williams, Waterman and Patterson 2009, "Roofline", CACM 52(4).
        """
        return self.peak_flops / self.memory_bandwidth

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The roofline's floor: no less than the slower of the arithmetic and the traffic."""
        return max(flops / self.peak_flops, num_bytes / self.memory_bandwidth)


_TERA, _GIGA, _MIB = 1e12, 1e9, 2.0**20  # caches come in powers of two
_HOPPER = "L2, SMs: NVIDIA H100 Tensor Core GPU Architecture white paper, 2022"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="A100-80GB-SXM",
                peak_flops=312 * _TERA,
                memory_bandwidth=2.039 * _TERA,
                memory_bytes=80 * _GIGA,
                on_chip_bytes=40 * _MIB,
                power_watts=400,
                source="NVIDIA A100 Tensor Core GPU datasheet",
                date="2021-06",
                note="L2, SMs: NVIDIA A100 Tensor Core GPU Architecture white paper, 2020",
                num_sms=108,
            ),
            Device(
                name="H100-SXM",
                peak_flops=989 * _TERA,
                memory_bandwidth=3.35 * _TERA,
                memory_bytes=80 * _GIGA,
                on_chip_bytes=50 * _MIB,
                power_watts=700,
                source="NVIDIA H100 Tensor Core GPU datasheet",
                date="2023-03",
                note=f"the datasheet prints 1,979 TFLOP/s, with sparsity; {_HOPPER}",
                num_sms=132,
            ),
            Device(
                name="H200-SXM",
                peak_flops=989 * _TERA,
                memory_bandwidth=4.8 * _TERA,
                memory_bytes=141 * _GIGA,
                on_chip_bytes=50 * _MIB,
                power_watts=700,
                source="NVIDIA H200 Tensor Core GPU datasheet",
                date="2023-11",
                note=f"the datasheet prints 1,979 TFLOP/s, with sparsity; {_HOPPER}, same die",
                num_sms=132,
            ),
            Device(
                name="B200",
                peak_flops=2250 * _TERA,
                memory_bandwidth=7.7 * _TERA,
                memory_bytes=180 * _GIGA,
                on_chip_bytes=126 * _MIB,
                power_watts=1000,
                source="NVIDIA Blackwell datasheet, HGX B200",
                date="2025-01",
                note="8 TB/s, 192 GB also quoted; L2, SMs: Chips and Cheese, 'Nvidia's B200', 2025",
                num_sms=148,
            ),
            Device(
                name="T4",
                peak_flops=65 * _TERA,
                memory_bandwidth=0.32 * _TERA,
                memory_bytes=16 * _GIGA,
                on_chip_bytes=4 * _MIB,
                power_watts=70,
                source="NVIDIA T4 Tensor Core GPU datasheet",
                date="2019-03",
                note="float16: Turing has no bfloat16; "
                "SMs: NVIDIA Turing GPU Architecture white paper, 2018",
                num_sms=40,
            ),
            Device(
                name="Groq-LPU-v1",
                peak_flops=188 * _TERA,
                memory_bandwidth=80 * _TERA,
                memory_bytes=0.23 * _GIGA,
                on_chip_bytes=0.23 * _GIGA,
                power_watts=300,
                source="GroqChip Processor product brief; Abts et al., ISCA 2022",
                date="2022-06",
                note="float16; no memory but the chip's SRAM; 215 W is also quoted",
            ),
            Device(
                name="Cerebras-WSE-3",
                peak_flops=125e15,
                memory_bandwidth=21e15,
                memory_bytes=44 * _GIGA,
                on_chip_bytes=44 * _GIGA,
                power_watts=23_000,
                source="Cerebras press release 'Third Generation 5nm Wafer Scale Engine', CS-3",
                date="2024-03",
                note="float16 'peak AI performance', which may count sparsity; power of a system",
            ),
        )
    }
)

# Short names, as a command line reads them: of each GPU the part that the table holds.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "a100": "A100-80GB-SXM",
        "h100": "H100-SXM",
        "h200": "H200-SXM",
        "b200": "B200",
        "t4": "T4",
        "groq": "Groq-LPU-v1",
        "cerebras": "Cerebras-WSE-3",
    }
)


def find_device(name: str) -> Device:
    """A chip by its name or its short name, in any case: "h100", "H100-SXM".

    Raises `ValueError` for an unknown name, with those there are.
    """
    full = {device.lower(): device for device in DEVICES} | dict(ALIASES)
    if name.lower() not in full:
        raise ValueError(
            f"device must be one of {', '.join(ALIASES)} or {', '.join(DEVICES)}, got {name!r}"
        )
    return DEVICES[full[name.lower()]]
