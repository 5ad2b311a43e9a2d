"""The tree of regions under its former path."""

from __future__ import annotations

from deep500_timing._summary.tree import BUCKETS, REST, Node, OnDevice, Tree

__all__ = ["BUCKETS", "REST", "Node", "OnDevice", "Tree"]
