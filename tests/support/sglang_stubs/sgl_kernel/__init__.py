"""An empty package of SGLang's kernels, published for CUDA only; on a CPU without AMX SGLang computes with torch."""

from absent_package import install

install(__name__)
