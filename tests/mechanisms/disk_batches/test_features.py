"""Feature files in the forms people have: any range of rows is what NumPy reads; bad files are refused by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.mechanisms.disk_batches.features import FeatureTable, open_features
from espalier.recipe.errors import UserError

ROWS = np.random.default_rng(0).normal(size=(1500, 7)).astype(np.float32)


def npy(folder: Path) -> Path:
    np.save(folder / "a.npy", ROWS)
    return folder / "a.npy"


def raw(folder: Path) -> Path:
    (folder / "rows.bin").write_bytes(ROWS.tobytes())
    (folder / "rows.bin.json").write_text(json.dumps({"dtype": "float32", "shape": list(ROWS.shape)}))
    return folder / "rows.bin"


def shards(folder: Path) -> Path:
    for at in range(12):  # part-2 comes before part-10
        np.save(folder / f"part-{at}.npy", ROWS[at * 130 : (at + 1) * 130 if at < 11 else None])
    np.save(folder / "labels.npy", np.zeros(3))
    return folder


def parquet(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    table = pyarrow.table({f"f{at}": ROWS[:, at] for at in range(7)})
    files.write_table(table, folder / "rows.parquet", row_group_size=400)
    return folder / "rows.parquet"


def parquet_lists(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    for at, part in enumerate(np.array_split(ROWS, 3)):
        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.reshape(-1)), 7)
        files.write_table(pyarrow.table({"feat": rows}), folder / f"rows-{at}.parquet", row_group_size=333)
    return folder


def ogb(folder: Path) -> Path:
    (folder / "raw").mkdir()
    np.savetxt(folder / "raw" / "node-feat.csv.gz", ROWS, delimiter=",", fmt="%.9g")
    return folder


def ogb_binary(folder: Path) -> Path:
    (folder / "raw").mkdir()
    np.savez(folder / "raw" / "data.npz", edge_index=np.zeros((2, 9), np.int64), node_feat=ROWS)
    return folder


def ogb_lsc(folder: Path) -> Path:
    (folder / "processed" / "paper").mkdir(parents=True)
    np.save(folder / "processed" / "paper" / "node_feat.npy", ROWS)
    return folder


GRAPHBOLT = """
dataset_name: some
graph: {graph_type: FusedCSCSamplingGraph, graph_path: preprocessed/graph.pt}
feature_data:
- {domain: edge, type: null, name: weight, format: numpy, path: weight.npy}
- {domain: node, type: null, name: year, format: numpy, path: year.npy}
- {domain: node, type: null, name: feat, format: FORMAT, in_memory: false, path: PLACEfeat.EXT}
tasks: []
"""


def graphbolt(folder: Path, form: str = "numpy", begin: str = "preprocessed/") -> Path:
    """As DGL 2.1.0 writes it, with paths that begin at the folder of the data set."""
    pytest.importorskip("yaml")
    place = folder / "preprocessed"
    place.mkdir()
    text = GRAPHBOLT.replace("FORMAT", form).replace("PLACE", begin).replace("EXT", "npy" if form == "numpy" else "pt")
    (place / "metadata.yaml").write_text(text)
    if form == "numpy":
        np.save(place / "feat.npy", ROWS)
    else:
        torch.save(torch.from_numpy(ROWS), place / "feat.pt")
    return folder


def graphbolt_torch(folder: Path) -> Path:
    return graphbolt(folder, "torch")


def graphbolt_beside(folder: Path) -> Path:
    return graphbolt(folder, begin="")


FORMS: list[Callable[[Path], Path]] = [
    *(npy, raw, shards, parquet, parquet_lists, ogb, ogb_binary, ogb_lsc, graphbolt, graphbolt_torch),
    graphbolt_beside,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.__name__)
def test_rows_of_every_form_are_what_was_written(tmp_path, form):
    found = open_features(form(tmp_path), nodes=1500)
    assert (len(found), found.shape, found.row_bytes) == (1500, (7,), 28)
    assert found.dtype == torch.float32
    assert all(one.exists() for one in found.sources)
    for start, stop in ((0, 1500), (0, 0), (129, 131), (399, 1001), (1499, 1500)):
        assert np.array_equal(found.consecutive(start, stop).numpy(), ROWS[start:stop])
    ids = torch.tensor([5, 6, 7, 1499, 0, 0, 130, 129, 131])
    out = torch.empty(len(ids), 7)
    found.read(ids, out)
    assert np.array_equal(out.numpy(), ROWS[ids.numpy()])
    with pytest.raises(UserError, match="There is no row 1500"):
        found.read(torch.tensor([1500]), torch.empty(1, 7))


@given(st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_of_any_dtype_is_read_whole(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("features")
    kind = data.draw(st.sampled_from(("float32", "float16", "float64", "int8", "uint8")))
    rows = (
        np.random.default_rng(1).normal(size=(data.draw(st.integers(0, 90)), data.draw(st.integers(1, 9)))) * 9
    ).astype(kind)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    for at, part in enumerate(np.split(rows, cuts)):
        np.save(folder / f"x{at}.npy", part)
    found = open_features(folder)
    assert np.array_equal(found.consecutive(0, len(rows)).numpy(), rows)
    ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if len(rows) else []
    out = torch.empty(len(ids), rows.shape[1], dtype=found.dtype)
    found.read(torch.tensor(ids, dtype=torch.int64), out)
    assert np.array_equal(out.numpy(), rows[ids])


def test_bfloat16_is_read_from_raw_files(tmp_path):
    rows = torch.randn(5, 3).bfloat16()
    (tmp_path / "rows").write_bytes(rows.view(torch.uint8).numpy().tobytes())
    found = open_features(tmp_path / "rows", dtype="bfloat16", shape=(5, 3))
    assert torch.equal(found.consecutive(0, 5), rows)


def test_a_table_in_memory_is_features_too():
    table = FeatureTable(torch.arange(6.0).view(3, 2))
    out = torch.empty(2, 2)
    table.read(torch.tensor([2, 0]), out)
    assert out.tolist() == [[4, 5], [0, 1]]


# --- bad input -------------------------------------------------------------------------------------------------------


def cut(folder: Path) -> Path:
    path = npy(folder)
    path.write_bytes(path.read_bytes()[:-29])
    return path


def cut_raw(folder: Path) -> Path:
    path = raw(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return path


def by_columns(folder: Path) -> Path:
    np.save(folder / "a.npy", np.asfortranarray(ROWS))
    return folder / "a.npy"


def complex_values(folder: Path) -> Path:
    np.save(folder / "a.npy", ROWS.astype(np.complex64))
    return folder / "a.npy"


def one_dimension(folder: Path) -> Path:
    np.save(folder / "a.npy", ROWS[0])
    return folder / "a.npy"


def not_npy(folder: Path) -> Path:
    (folder / "a.npy").write_bytes(b"rows")
    return folder / "a.npy"


def other_widths(folder: Path) -> Path:
    np.save(folder / "x0.npy", ROWS)
    np.save(folder / "x1.npy", ROWS[:, :3])
    return folder


def other_dtypes(folder: Path) -> Path:
    np.save(folder / "x0.npy", ROWS)
    np.save(folder / "x1.npy", ROWS.astype(np.float16))
    return folder


def two_kinds(folder: Path) -> Path:
    np.save(folder / "x0.npy", ROWS)
    np.save(folder / "y0.npy", ROWS)
    return folder


def unsaid(folder: Path) -> Path:
    (folder / "rows.bin").write_bytes(ROWS.tobytes())
    return folder / "rows.bin"


def badly_said(folder: Path) -> Path:
    (folder / "rows.bin.json").write_text("{}")
    return unsaid(folder)


def unknown_dtype(folder: Path) -> Path:
    (folder / "rows.bin.json").write_text('{"dtype": "flot32", "shape": [1500, 7]}')
    return unsaid(folder)


def odd_shape(folder: Path) -> Path:
    (folder / "rows.bin.json").write_text('{"dtype": "float32", "shape": [1500, 7.5]}')
    return unsaid(folder)


def half_the_dtype(folder: Path) -> Path:
    (folder / "rows.bin.json").write_text('{"dtype": "float16", "shape": [1500, 7]}')
    return unsaid(folder)


def compressed(folder: Path) -> Path:
    np.savez_compressed(folder / "data.npz", node_feat=ROWS)
    return folder / "data.npz"


def without_features(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "data.npz", "w") as archive:
        archive.writestr("edge_index.npy", b"")
    return folder / "data.npz"


def words(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"a": [1.0, 2.0], "b": ["x", "y"]}), folder / "rows.parquet")
    return folder / "rows.parquet"


def uneven_lists(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"a": [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]]}), folder / "rows.parquet")
    return folder / "rows.parquet"


def metadata_without_features(folder: Path) -> Path:
    pytest.importorskip("yaml")
    (folder / "metadata.yaml").write_text("feature_data: []")
    return folder


BAD = {
    cut: r"a.npy is too short: 1,500 rows of 28 bytes end at 42,128, and it has 42,099.*29 bytes are missing",
    cut_raw: r"rows.bin is too short: .*1 bytes are missing",
    by_columns: r"float32 by columns",
    complex_values: r"\[1500, 7\] of complex64",
    one_dimension: r"\[7\] of float32",
    not_npy: r"a.npy cannot be read",
    other_widths: r"x1.npy has rows of 3 x float32.*x0.npy, the first shard, has 7 x float32",
    other_dtypes: r"x1.npy has rows of 7 x float16",
    two_kinds: r"shards of x#.npy, y#.npy",
    unsaid: r"its dtype and shape are not known.*rows.bin.json",
    badly_said: r"cannot be read: it lacks 'dtype'",
    unknown_dtype: r"the dtype 'flot32' is not known.*try: float32",
    odd_shape: r"\[1500, 7.5\] is no shape of rows",
    half_the_dtype: r"42,000 bytes, more than 1,500 rows of 14 bytes.*28 bytes per row are not 7 x float16",
    compressed: r"they are compressed",
    without_features: r"it has edge_index.npy, and no node_feat",
    words: r"rows.parquet cannot be read: could not convert",
    uneven_lists: r"cannot be read: the lists differ in length",
    metadata_without_features: r"metadata.yaml cannot be read",
    lambda folder: folder: r"holds no features that are known",
    lambda folder: folder / "nothing.npy": r"nothing.npy do not exist",
}


@pytest.mark.parametrize("form", BAD, ids=lambda one: one.__name__)
def test_bad_files_are_refused_by_name(tmp_path, form):
    with pytest.raises(UserError, match=f"(?s){BAD[form]}"):
        open_features(form(tmp_path))


def test_other_rows_than_nodes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"(?s)1,500 rows of features for 1,600 nodes.*7 x float32"):
        open_features(npy(tmp_path), nodes=1600)
