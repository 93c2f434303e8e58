"""Spikes along rays: ragged and padded scans fire alike, as SpikingJelly's neurons do, and are counted one by one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.kernels import counts
from espalier.kernels.ragged import Ragged, offsets_of
from espalier.radiance import spikingnerf
from espalier.radiance.spikingnerf import LIF, SpikingColours, aligned, lif_scan, lif_scan_padded, lif_scan_ragged
from espalier.radiance.volume_rendering import RaySamples
from espalier.radiance.voxels import ColourNetwork, encoded
from espalier.recipe import SpikingNerf, Voxels

LENGTHS = torch.tensor([3, 0, 17, 1, 0, 9])


def rows(channels: int = 13, seed: int = 0, dtype: torch.dtype = torch.float32) -> Ragged:
    drawn = torch.Generator().manual_seed(seed)
    values = 1 + 1.5 * torch.randn(int(LENGTHS.sum()), channels, generator=drawn, dtype=dtype)
    return Ragged.of_lengths(values, LENGTHS)


def samples(seed: int = 0) -> RaySamples:
    """Survivors with gaps between them."""
    drawn = torch.Generator().manual_seed(seed)
    total = int(LENGTHS.sum())
    steps = torch.randint(1, 4, (total,), generator=drawn)
    offsets = offsets_of(LENGTHS)
    rays = Ragged(steps, offsets).row_ids()
    numbers = torch.cat([steps[rays == ray].cumsum(0) for ray in range(len(LENGTHS))])
    return RaySamples(torch.randn(total, 3, generator=drawn), numbers.float(), numbers, offsets)


def inputs(features: int = 6) -> tuple[torch.Tensor, torch.Tensor, RaySamples]:
    drawn = torch.Generator().manual_seed(5)
    found = samples()
    views = torch.nn.functional.normalize(torch.randn(len(LENGTHS), 3, generator=drawn), dim=1)
    return 3 * torch.randn(len(found.points), features, generator=drawn), views, found


@pytest.fixture
def network() -> SpikingColours:
    torch.manual_seed(0)
    return SpikingColours(6, 24)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_and_padded_scans_fire_the_same_spikes(seed: int) -> None:
    """Bit for bit, and their gradients to 1e-6: no tail of zeros fires."""
    given, wanted = rows(seed=seed), torch.randn(int(LENGTHS.sum()), 13)
    gradients = []
    for form in (lif_scan_ragged, lif_scan.reference.run):
        currents = given.values.clone().requires_grad_(True)
        spikes = form(currents, given.offsets, LIF)
        gradients.append(torch.autograd.grad((spikes * wanted).sum(), currents)[0])
        assert torch.equal(spikes.detach(), lif_scan_ragged(given.values, given.offsets))
        assert 0.1 < float(spikes.detach().mean()) < 0.9
    assert torch.allclose(*gradients, atol=1e-6)
    tail = lif_scan_padded(given.padded())
    assert not tail[torch.arange(tail.shape[1])[None] >= LENGTHS[:, None]].any()


def test_spikes_are_those_of_spikingjelly() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    given, wanted = rows(64, dtype=torch.float32), torch.randn(int(LENGTHS.sum()), 64)
    theirs = neuron.LIFNode(tau=2.0, detach_reset=True, step_mode="m")
    padded = given.padded().transpose(0, 1).contiguous().requires_grad_(True)
    fired = theirs(padded)
    mask = (torch.arange(padded.shape[0])[None] < LENGTHS[:, None]).T
    own = given.values.clone().requires_grad_(True)
    spikes = lif_scan_ragged(own, given.offsets)
    assert torch.equal(spikes, fired.transpose(0, 1)[mask.T])
    (spikes * wanted).sum().backward()
    (fired.transpose(0, 1)[mask.T] * wanted).sum().backward()
    assert torch.allclose(own.grad, padded.grad.transpose(0, 1)[mask.T], atol=1e-6)  # type: ignore[union-attr]


SPIKES = "001000 000001 000000 101000 000101 000000 100000 010100 000010 000000 010000 001010"
GRADIENTS = (0.5650944, -0.067912, 0.4050245, 0.6199867, 1.1312923, 0.6688883)


@pytest.mark.parametrize("form", [lif_scan_ragged, lif_scan.reference.run])
def test_spikes_are_those_that_spikingjelly_gave(form) -> None:
    """Of its `LIFNode(tau=2.0, detach_reset=True, step_mode="m")`, version 2.0.0, on currents without rounding:
    six neurons, twelve steps; and the gradient of each neuron's currents."""
    time, neuron = torch.arange(12)[:, None], torch.arange(6)[None]
    currents = ((time * 7 + neuron * 5) % 11 / 4 - 0.5).requires_grad_(True)
    spikes = form(currents, torch.tensor([0, 12]), LIF)
    assert " ".join("".join(str(int(one)) for one in step) for step in spikes.tolist()) == SPIKES
    (spikes * ((time * 3 + neuron * 2) % 7 / 4 - 0.75)).sum().backward()
    assert currents.grad is not None
    assert torch.allclose(currents.grad.sum(0), torch.tensor(GRADIENTS), atol=1e-6)


@pytest.mark.parametrize("setting", range(4))
def test_random_rays_fire_as_in_spikingjelly_and_have_its_gradients(setting: int) -> None:
    """What SpikingJelly 2.0.0 gave for random currents on rays of 5, 0, 12, 1 and 20 samples, spike for spike and
    sample for sample, with several settings (`LIFNode(tau, v_threshold, surrogate.Sigmoid(alpha),
    detach_reset=True, step_mode="m")`): its package would bring torchvision and torchaudio to every test."""
    kept = json.loads((Path(__file__).parent / "spikingjelly_lif.json").read_text())[setting]

    def read(name: str, dtype: type = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(base64.b64decode(kept[name]), dtype=dtype).reshape(-1, 8).copy())

    neuron = spikingnerf.Neuron(kept["tau"], kept["threshold"], kept["steepness"])
    given = Ragged.of_lengths(read("currents"), torch.tensor(kept["lengths"]))
    for form in (lif_scan_ragged, lif_scan.reference.run):
        currents = given.values.clone().requires_grad_(True)
        spikes = form(currents, given.offsets, neuron)
        assert torch.equal(spikes.detach(), read("spikes", np.uint8).float())
        (spikes * read("wanted")).sum().backward()
        assert torch.allclose(currents.grad, read("gradients"), atol=1e-6)  # type: ignore[arg-type]


def test_a_neuron_leaks_fires_and_resets_as_written() -> None:
    x = torch.tensor([[1.5], [1.5], [0.0], [2.0]])
    assert lif_scan(x, torch.tensor([0, 4])).flatten().tolist() == [0, 1, 0, 1]  # membranes 0.75, 1.125 → 0, 0, 1


@pytest.mark.parametrize("piece", [1, 5, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_by_pieces_is_the_plain_one_and_keeps_only_membranes(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same spikes, and products and gradients to 1e-6, in pieces of one ray, of some, and of all; for backward four
    (or eight) bytes a neuron and step are kept, whatever the number of spikes."""
    monkeypatch.setattr(spikingnerf, "PIECE", piece)
    given, wanted, weight = rows(dtype=dtype), torch.randn(int(LENGTHS.sum()), 7, dtype=dtype), torch.randn(7, 13)
    found = []
    for form in (spikingnerf.spiking_layer_by_pieces, spikingnerf.spiking_layer.reference.run):
        currents, matrix = given.values.clone().requires_grad_(True), weight.to(dtype).requires_grad_(True)
        kept = kept_by(lambda form=form, currents=currents, matrix=matrix: form(currents, given.offsets, matrix)[0])
        product, number = form(currents, given.offsets, matrix)
        ((product * wanted).sum() + 0.3 * number).backward()
        found.append((product.detach(), currents.grad, matrix.grad, number.detach(), kept))
    assert float(found[0][3]) == float(found[1][3]) == float(lif_scan_padded(given.padded()).sum())
    for own, plain in zip(found[0][:3], found[1][:3], strict=True):
        assert torch.allclose(own, plain, atol=1e-6)  # type: ignore[arg-type]
    size = given.values.element_size()
    assert found[0][4] == size * (given.values.numel() + weight.numel()) + 8 * len(given.offsets)


def test_a_layer_has_its_gradient_where_only_spikes_count() -> None:
    given = rows()
    own, weight = given.values.clone().requires_grad_(True), torch.randn(7, 13)
    spikingnerf.spiking_layer(own, given.offsets, weight)[1].backward()
    plain = given.values.clone().requires_grad_(True)
    lif_scan.reference.run(plain, given.offsets, LIF).sum().backward()
    assert torch.allclose(own.grad, plain.grad, atol=1e-6)  # type: ignore[arg-type]


def kept_by(action: Callable[[], torch.Tensor]) -> int:
    """Bytes that a pass keeps for backward, each piece of memory once."""
    kept: dict[int, int] = {}

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        action()
    return sum(kept.values())


def test_ragged_rays_keep_less_than_half_of_what_padded_ones_keep() -> None:
    """Of rays of 1 to 60 samples, as many of each length."""
    lengths = torch.arange(1, 61)
    given = Ragged.of_lengths(1 + torch.randn(int(lengths.sum()), 32), lengths)
    second, last = torch.randn(32, 32, requires_grad=True), torch.randn(3, 32, requires_grad=True)

    def ragged() -> torch.Tensor:
        currents = given.values.clone().requires_grad_(True)
        one = spikingnerf.spiking_layer(currents, given.offsets, second)[0]
        return spikingnerf.spiking_layer(one, given.offsets, last)[0]

    def padded() -> torch.Tensor:
        currents = given.padded().requires_grad_(True)
        two = lif_scan_padded(lif_scan_padded(currents) @ second.T)
        return Ragged.of_padded(two @ last.T, lengths).values

    assert torch.allclose(ragged(), padded(), atol=1e-5)
    assert kept_by(ragged) < 0.5 * kept_by(padded)


def test_condensing_is_a_permutation_and_no_gaps_make_tp_the_same() -> None:
    given, found = rows(), samples()
    values, offsets, places = aligned(given.values, found.numbers, found.offsets, "tp")
    assert torch.equal(values[places], given.values)
    assert int(offsets[-1]) > len(given.values)
    assert float(values.sum()) == pytest.approx(float(given.values.sum()), rel=1e-4)
    straight = torch.cat([torch.arange(int(length)) for length in LENGTHS])
    values, offsets, places = aligned(given.values, straight, found.offsets, "tp")
    assert torch.equal(values, given.values)
    assert torch.equal(offsets, found.offsets)


def test_a_gap_leaks_as_time_that_passes(network: SpikingColours) -> None:
    """TP is the padded scan with zeros where nothing is."""
    features, views, found = inputs()
    network.alignment = "tp"
    currents = network.currents(features, views, found)
    values, offsets, places = aligned(currents, found.numbers, found.offsets, "tp")
    spikes = lif_scan_padded(Ragged(values, offsets).padded())
    assert torch.equal(Ragged.of_padded(spikes, offsets.diff()).values[places], lif_scan(values, offsets)[places])
    assert network(features, views, found)[0].shape == (len(features), 3)


def test_flipping_rays_reverses_time(network: SpikingColours) -> None:
    """Of short numbers, whose sums of products are exact in any order of the rows."""
    features, views, found = inputs()
    for parameter in network.parameters():
        parameter.data = (16 * parameter.data).round() / 16
    features, views = (4 * features).round() / 4, (8 * views).round() / 8
    network.flip = True
    flipped, _ = network(features, views, found)
    network.flip = False
    order = Ragged(found.numbers, found.offsets).reversal()
    turned = RaySamples(found.points[order], found.distances[order], found.numbers[order], found.offsets)
    assert torch.equal(flipped, network(features[order], views, turned)[0][order])
    assert torch.equal(order[order], torch.arange(len(order))), "twice is as before"


@pytest.mark.parametrize("alignment", ["tcp", "tp", "repeated"])
@pytest.mark.parametrize("flip", [False, True])
def test_the_kernel_of_spikes_renders_what_dense_products_render(
    network: SpikingColours, alignment: str, flip: bool
) -> None:
    features, views, found = inputs()
    network.alignment, network.flip = alignment, flip
    dense, spikes = network(features, views, found)
    with torch.no_grad():
        fast, counted = network(features, views, found)
    assert torch.allclose(fast, dense, atol=1e-5)
    assert counted.tolist() == spikes.tolist()
    assert min(spikes.tolist()) > 0


def test_repeated_steps_are_the_mean_of_four(network: SpikingColours) -> None:
    features, views, found = inputs()
    network.alignment = "repeated"
    own = network(features, views, found)[0]
    x = network.currents(features, views, found)
    one = lif_scan_padded(x[:, None].expand(-1, 4, -1))
    two = lif_scan_padded(one @ network.matrix(network.second).T)
    assert torch.allclose(own, (two @ network.matrix(network.last).T).mean(1).sigmoid(), atol=1e-6)


def test_synaptic_operations_are_the_products_that_are_not_zero(network: SpikingColours) -> None:
    """Counted one by one, in backward's forms and in the kernel's; multiplications of real inputs stay MACs."""
    features, views, found = inputs()
    x = network.currents(features, views, found)
    one = lif_scan(x, found.offsets)
    two = lif_scan(one @ network.matrix(network.second).T, found.offsets)
    brute = float((one[:, None] * torch.ones_like(network.second.weight)[None] != 0).sum())
    brute += float((two[:, None] * torch.ones_like(network.last.weight)[None] != 0).sum())
    for grad in (True, False):
        with torch.set_grad_enabled(grad), counts.Counter() as counter:
            _, spikes = network(features, views, found)
        assert counter.total.acs == brute
        assert counter.total.macs == len(features) * 6 * 24 + len(LENGTHS) * 27 * 24
    options = SpikingNerf(features=6, width=24)
    done = spikingnerf.operations(options, len(features), len(LENGTHS), spikes)
    assert (done.acs, done.macs) == (brute, counter.total.macs)


def test_bytes_of_spiking_layers_are_those_counted_by_hand(network: SpikingColours) -> None:
    """30 samples on 6 rays, hidden 24, fp32: each layer reads its currents and the rays' offsets, writes spikes, reads
    them and its matrix, and writes its products; the kernel that renders counts as the layers do."""
    _, _, found = inputs()
    currents = 1 + torch.randn(30, 24, generator=torch.Generator().manual_seed(1))
    layers = 4 * (30 * 24 + 30 * 24 + 30 * 24 + 24 * 24 + 30 * 24) + 8 * 7
    layers += 4 * (30 * 24 + 30 * 24 + 30 * 24 + 3 * 24 + 30 * 3) + 8 * 7
    scaled = 2 * 4 * (24 * 24 + 3 * 24)  # matrices are read and written
    joined = 2 * 4 * 27 * 24 + 4 * (27 * 24 + 27 * 25) + 2 * 4 * 27 * 25  # put together, a row of zeros, transposed
    membranes = 2 * 4 * 30 * 24
    for form, moved in ((network._layers, layers + scaled), (network._from_spikes, layers + scaled + joined)):
        with torch.no_grad(), counts.Counter() as counter:
            form(currents, found.offsets)
        assert counter.total.bytes_moved == pytest.approx(moved, abs=48), "what adds two numbers of spikes is left open"
    with counts.Counter() as counter:
        network._layers(currents, found.offsets)
    assert counter.total.bytes_moved == pytest.approx(layers + scaled + membranes, abs=48)


def test_a_layer_whose_neurons_all_fire_moves_what_a_relu_and_a_product_move() -> None:
    currents, weight, offsets = torch.full((30, 24), 9.0), torch.randn(7, 24), offsets_of(LENGTHS)
    with torch.no_grad(), counts.Counter() as plain:
        torch.relu(currents) @ weight.T
    with torch.no_grad(), counts.Counter() as spiking:
        spikingnerf.spiking_product(currents, offsets, weight)
    assert spiking.total.bytes_moved == plain.total.bytes_moved + 8 * len(offsets)
    assert spiking.total.acs == plain.total.macs


def test_energy_is_the_papers_formula_by_hand() -> None:
    """10 samples on 2 rays, hidden 4: MACs at 4.6 pJ, accumulations at 0.9 pJ."""
    plain, spiking = Voxels(features=2, width=4), SpikingNerf(features=2, width=4)
    none, all_ = torch.zeros(2), torch.tensor([40.0, 40.0])
    ann = spikingnerf.operations(plain, 10, 2, none, hoists=False)
    assert ann.macs == 10 * (29 * 4 + 4 * 4 + 4 * 3)
    snn = spikingnerf.operations(spiking, 10, 2, all_, hoists=False)
    assert (snn.macs, snn.acs) == (10 * 29 * 4, 40 * 4 + 40 * 3)
    assert snn.joules() == pytest.approx(4.6e-12 * 1160 + 0.9e-12 * 280)
    assert ann.macs == snn.macs + snn.acs, "at a rate of 1 an accumulation for each product"
    hoisted = spikingnerf.operations(plain, 10, 2, none)
    assert ann.macs - hoisted.macs == 8 * 27 * 4


def test_directions_are_multiplied_once_a_ray_with_the_same_result() -> None:
    torch.manual_seed(1)
    network, (features, views, found) = ColourNetwork(6, 24), inputs()
    whole = torch.cat([features, encoded(views)[found.rays]], 1) @ network.matrix(network.first).T
    assert torch.allclose(network.currents(features, views, found), whole, atol=1e-5)


def test_no_survivor_gives_no_colour_and_a_gradient_of_nothing(network: SpikingColours) -> None:
    none = RaySamples(
        torch.zeros(0, 3), torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    )
    features = torch.zeros(0, 6, requires_grad=True)
    for alignment in ("tcp", "tp", "repeated"):
        network.alignment = alignment
        found, spikes = network(features, torch.ones(3, 3), none)
        assert found.shape == (0, 3)
        assert spikes.tolist() == [0, 0]
        found.sum().backward()
        assert not network.last.weight.grad.any()  # type: ignore[union-attr]
