"""An empty torchvision: its wheels do not fit a torch without CUDA, and SGLang needs it for images only."""

from absent_package import install

install(__name__)

__version__ = "0.0"
