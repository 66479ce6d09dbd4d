"""ROSE: rollouts on devices that serve users. Nothing is imported here, so that every part stays cheap to reach."""

__version__ = "0.1.0"
