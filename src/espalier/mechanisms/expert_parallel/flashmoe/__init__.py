"""Experts over ranks as one task graph on each rank, without barriers. After FlashMoE, arXiv 2506.04667."""

from espalier.mechanisms.expert_parallel.flashmoe.layer import FlashMoE as FlashMoE
