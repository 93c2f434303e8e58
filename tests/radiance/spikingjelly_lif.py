"""Fills in what SpikingJelly gives for the currents in spikingjelly_lif.json: spikes, and gradients of currents.

`python tests/radiance/spikingjelly_lif.py`, with spikingjelly 2.0.0; no test runs it. Currents and the gradients of
spikes ("wanted") were drawn at random once, and stay.
"""

import base64
import json
from pathlib import Path

import numpy as np
import torch
from spikingjelly.activation_based import neuron, surrogate

FILE = Path(__file__).with_suffix(".json")
settings = json.loads(FILE.read_text())
for one in settings:
    given = (np.frombuffer(base64.b64decode(one[name]), np.float32) for name in ("currents", "wanted"))
    currents, wanted = (torch.tensor(rows).view(-1, 8) for rows in given)
    currents.requires_grad_(True)
    smooth = surrogate.Sigmoid(alpha=one["steepness"])
    node = neuron.LIFNode(one["tau"], v_threshold=one["threshold"], surrogate_function=smooth, detach_reset=True)
    node.step_mode = "m"
    rays = []
    for ray in currents.split(one["lengths"]):
        node.reset()
        rays.append(node(ray) if len(ray) else ray)
    spikes = torch.cat(rays)
    (spikes * wanted).sum().backward()
    one["spikes"] = base64.b64encode(spikes.detach().numpy().astype(np.uint8).tobytes()).decode()
    one["gradients"] = base64.b64encode(currents.grad.numpy().tobytes()).decode()
FILE.write_text(json.dumps(settings, indent=1))
