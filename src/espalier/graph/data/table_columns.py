"""What the columns of tables of nodes and edges mean: ids, ends, weights, labels, parts and features.

Names that other programs use are understood, and said where they are not ours. Two columns that could both be meant are
refused. A column that is not used is named; one that changes the meaning of the others is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from espalier.graph.data import separated_text
from espalier.graph.data.graph import Array, DataSplit
from espalier.graph.data.separated_text import is_number
from espalier.graph.data.targets import EXACT, MISSING, WHOLE, as_words
from espalier.machine.resource_limits import refuse_large
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable, unused
from espalier.recipe.units import plural

_DECIMAL = re.compile(r"[-+]?[0-9]+(,[0-9]+)?(e[-+]?[0-9]+)?", re.IGNORECASE)
_TRUTH = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0, "yes": 1.0, "no": 0.0}

_INDEX = "index|indexlevel0|"
"""The index that pandas writes. Names of columns are patterns, of names as `_plain` gives them."""
_IDS = "id|nodeid"
_MAYBE_IDS = ("node", "name", *_INDEX.split("|"))
"""Ids where no column is called id, and the ends of edges do not speak against it; the first of them."""
_ENDS_IN_ID = re.compile(r".*[\W_][iI][dD]|.*[a-z]I[Dd]")
_SOURCES = "source|src|from|head|u|node1|nodea|id1|(source|src|from)(node)?id|citing|sender"
_TARGETS = "target|dst|to|tail|v|node2|nodeb|id2|(target|dst|to)(node)?id|cited|receiver|dest|destination"
_WEIGHTS = "(edge)?weights?"
_LABELS = "labels?|class|target|nodelabel|(label|class|target)(id|index|code|name)"
_COLUMNS_OF_LABELS = "(label|target|task|y)[0-9]+"
_PARTS = "part|split|subset"
_MASKS = tuple(f"(is|in)?({words})(mask)?" for words in ("train(ing)?", "val|valid|validation|dev", "test(ing)?"))
_KINDS = "nodetype|edgetype|rel|relation(ship)?|predicate|edgereltype|reltype"
_TYPED = re.compile(r"(.*):(id|start_id|end_id|type|label|int|long|float|double|boolean|string)(\[\])?(\(.*\))?", re.I)
_NEO4J = {"id": "id", "start_id": "source", "end_id": "target", "type": "edgetype", "label": "nodetype"}
"""What the types mean that Neo4j's exports have after a column's name, as in `personId:ID(Person)`."""
"""Kinds of nodes and edges, of which networks know one."""
PART_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}

Columns = Mapping[str, Array]
"""Cells by the name of their column."""


@dataclass(frozen=True)
class Table:
    """Columns by name, and what was said while they were read. `header`: the file names them."""

    path: Path
    columns: Columns
    header: bool = True
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Its path in messages."""
        return printable(self.path)

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def unused(self, name: str, why: str) -> str:
        """The note on a column that is not used."""
        return unused("column", name, f"of {self.path.name}, {why}")


@dataclass(frozen=True)
class NodeTable:
    """A table of nodes, understood.

    Attributes:
        ids: a column, or None: the row numbers.
        maybe: the name of a column that may be the ids; `settled` decides by the ends of edges.
        labels: a column as it is stored, or several; label_columns: their names.
        features: float64 columns; texts: columns of words.
    """

    table: Table
    ids: Array | None = None
    maybe: str | None = None
    labels: Array | None = None
    label_columns: tuple[str, ...] = ()
    parts: DataSplit | None = None
    features: Columns = field(default_factory=dict)
    texts: Columns = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EdgeTable:
    """A table of edges, understood: its ends as they are stored, and float64 columns.

    Attributes:
        types: `directed`, `undirected` or both, where the table says so.
        nodes: how many there are at least.
    """

    table: Table
    sources: Array
    targets: Array
    weights: Array | None = None
    features: Columns = field(default_factory=dict)
    types: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    nodes: int | None = None


# --- tables ----------------------------------------------------------------------------------------------------------


def read_nodes(path: Path) -> NodeTable:
    """The table of nodes at `path`, separated text or Parquet. Raises UserError."""
    known = "|".join((_IDS, "node|name|index|y", _LABELS, _PARTS, *_MASKS, _KINDS))
    if path.suffix.lower() == ".parquet":
        return nodes_of(_parquet(path))
    layout = separated_text.layout(path)
    return nodes_of(_table(layout, _names_any(layout.comment, known), _has_header(layout, known)))


def read_edges(path: Path, ids: Array | None) -> EdgeTable:
    """The table of edges at `path`; `ids` of nodes tell an edge from a header. Raises UserError."""
    if path.suffix.lower() == ".parquet":
        return edges_of(_parquet(path))
    layout = separated_text.layout(path)
    return edges_of(_table(layout, bool(end_names(layout.comment)), _edges_have_header(layout, ids)))


def _table(layout: separated_text.Layout, commented: bool, header: bool) -> Table:
    commented = commented and len(layout.comment) == len(layout.cells[0])
    first = layout.comment if commented and not header else layout.cells[0]
    names = [cell.strip() for cell in first] if commented or header else [""] * len(first)
    names = [name or (f"column {at + 1}" if at or not header else "") for at, name in enumerate(names)]
    notes = layout.notes
    if commented and not header:
        notes += (f"the last comment line of {layout.path.name} names its columns",)
    elif not header:
        notes += (f"{layout.path.name} has no header: its first row is {printable(', '.join(first), 60)!r}",)
    return Table(layout.path, separated_text.named(layout, names, header), commented or header, notes)


def _has_header(layout: separated_text.Layout, known: str) -> bool:
    """Whether the first row names columns: one is known, or one has numbers below a word."""
    first = layout.cells[0]
    if all(map(_is_decimal, first)):
        return False
    counted = first == ["", *map(str, range(len(first) - 1))]  # pandas, of an array
    if _names_any(first, known) or counted or _words_over_numbers(layout.cells):
        return True
    raise UserError(
        f"{printable(layout.path)}: its first row {printable(', '.join(first), 60)!r} may name columns or not.",
        why="no name in it is known, and no column has numbers below it",
        do="put a line of names first: source,target for edges; id,label,part … for nodes",
    )


def _words_over_numbers(cells: list[list[str]]) -> bool:
    words = [(cell, below) for cell, *below in zip(*cells, strict=False) if cell and not _is_decimal(cell)]
    return any(below and all(map(_is_decimal, below)) for _, below in words)


def _is_decimal(cell: str) -> bool:
    return is_number(cell) or _DECIMAL.fullmatch(cell.strip()) is not None


def end_names(cells: Collection[str]) -> list[str]:
    """The names of the two ends of edges among names of columns; none where one of them is missing."""
    ends = [next((cell for cell in cells if _is(cell, names)), "") for names in (_SOURCES, _TARGETS)]
    return ends if all(ends) else []


def _edges_have_header(layout: separated_text.Layout, ids: Array | None) -> bool:
    first, *others = layout.cells
    named = bool(end_names(first))
    are_ids = [_is_id(cell, ids) for cell in first[:2]]
    if all(are_ids) and named:
        raise UserError(
            f"{printable(layout.path)}: its first row {printable(', '.join(first), 60)!r} may be an edge or a header.",
            why="its cells are names of columns, and ids of nodes",
            do="write source,target as the first line and the edges below it",
        )
    if named or all(are_ids) or (all(map(_is_decimal, first[:2])) and not _words_over_numbers(layout.cells)):
        return named
    if any(are_ids):
        return False  # an edge to a node that is not in the table, which is an error later
    below = [_is_id(cell, ids) for cell in (others[0] if others else ())[:2]]
    return (len(below) > 1 and all(below)) or _has_header(layout, _WEIGHTS)


def _is_id(cell: str, ids: Array | None) -> bool:
    if ids is None or (ids.dtype.kind in "biuf" and not is_number(cell)):
        return False
    return bool((ids == (float(cell) if ids.dtype.kind in "biuf" else cell.strip())).any())


def _parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "graph", f"data.path = '{path}'") from None
    with parsing(path, "give a Parquet file, .csv or .npz"):
        about = parquet.ParquetFile(path).metadata
        size = sum(about.row_group(at).total_byte_size for at in range(about.num_row_groups))
        refuse_large(printable(path), max(size, 8 * about.num_rows * about.num_columns))
        table = parquet.read_table(path)
        if len(set(table.column_names)) < table.num_columns:
            raise ValueError("two of its columns have one name")
        return Table(path, {name: table[name].to_numpy() for name in table.column_names})


def _drop_kinds(table: Table, columns: dict[str, Array]) -> list[str]:
    """Takes columns that say of which kind a node or an edge is out of `columns`, and names them. Raises UserError
    where there may be several kinds."""
    do = "leave rows of one kind in the table and drop the column"
    kinds = [name for name in columns if _is(name, _KINDS)]
    refused = {name: do for name in kinds if table.rows < 2 or len(set(as_words(columns[name]))) > 1}
    FieldUse(Fields("column", frozenset(), refused), table.path.name).count(refused)
    return [table.unused(name, f"always {printable(columns.pop(name)[0])!r}") for name in kinds]


def _drop(table: Table, columns: dict[str, Array], names: Iterable[str], why: str) -> list[str]:
    """Takes the columns `names` out of `columns`, and names them."""
    notes = [table.unused(name, why) for name in names]
    for name in names:
        del columns[name]
    return notes


def _is(name: str, names: str) -> bool:
    return re.fullmatch(names, _plain(name)) is not None


def _names_any(cells: Iterable[str], names: str) -> bool:
    return any(_is(cell, names) for cell in cells)


def _plain(name: str) -> str:
    """A column's name without case and marks between words: `nodeid` of `Node_ID`; empty for pandas' `Unnamed: 0`."""
    typed = _TYPED.fullmatch(name.strip())
    name = name if typed is None else _NEO4J.get(typed[2].lower(), typed[1])
    plain = re.sub(r"[\s_.-]", "", name).casefold()
    return "" if plain.startswith("unnamed:") else plain


# --- nodes -----------------------------------------------------------------------------------------------------------


def nodes_of(table: Table) -> NodeTable:
    """A table of nodes, by the names of its columns. Raises UserError."""
    left = dict(table.columns)
    notes = list(table.notes)
    notes += _drop_kinds(table, left)
    roles = {}
    notes += _drop(table, left, _names_of_nodes(left), "a name for each node")
    labels = _LABELS if _names_any(left, "x") else f"{_LABELS}|y"  # y may be a coordinate
    for role, names in (("id", _IDS), ("label", labels), ("part", _PARTS)):
        if (column := _sole(table, left, names, role)) is not None:
            roles[role] = column
    taken = _taken(table, left, roles, notes)
    label_columns = [roles["label"]] if "label" in roles else []
    if not label_columns and (several := _columns_of_labels(table, left, notes)):
        taken["label"] = np.stack([*several.values()], 1)
        label_columns = list(several)
    masks = {name: left.pop(name) for name in _mask_names(left)}
    notes += [f"column {name!r} of {table.path.name} is the mask of a part" for name in masks if not _is_mask(name)]
    maybe = None
    if "id" not in taken:
        candidates = [name for plain in _MAYBE_IDS for name in left if _plain(name) == plain]
        candidates += [name for name in left if _ENDS_IN_ID.fullmatch(name)]
        maybe = next(iter((*candidates, *table.columns)))
        maybe = maybe if maybe in left else None
    notes += _drop(table, left, [name for name in left if _is(name, _INDEX) and name != maybe], "an index")
    return NodeTable(
        table,
        taken.get("id"),
        maybe,
        _labels(table, taken.get("label"), notes),
        tuple(label_columns),
        _parts(table, taken.get("part"), masks),
        left,
        notes=tuple(notes),
    )


def _columns_of_labels(table: Table, columns: dict[str, Array], notes: list[str]) -> dict[str, Array]:
    """float64 columns called `label_0`, `label_1` … or `y1`, `y2` …, taken out of `columns`."""
    names = [name for name in columns if _is(name, _COLUMNS_OF_LABELS)]
    if len(names) < 2 or _names_any(columns, "x[0-9]*"):  # y1 may be a coordinate
        return {}
    numbers = _numeric(table, {name: columns.pop(name) for name in names}, "the label {}", notes)
    if numbers:
        notes.append(f"columns of {table.path.name}: {printable(', '.join(numbers))} are the labels")
    return numbers


def _labels(table: Table, column: Array | None, notes: list[str]) -> Array | None:
    """A column of labels; numbers with decimal commas get points, which is said in `notes`, and lists become rows."""
    if column is not None and column.dtype.kind == "O" and any(isinstance(cell, np.ndarray) for cell in column):
        return np.stack(list(column))
    words = [] if column is None or column.dtype.kind not in "OU" else as_words(column)
    filled = [word for word in words if word not in MISSING]
    if not any("," in word for word in filled) or not all(map(_DECIMAL.fullmatch, filled)):
        return column
    notes.append(f"the labels of {table.path.name} have decimal commas")
    _decimal_commas(filled, f"{table.shown}: the label")
    return np.array([word.replace(",", ".") for word in words])


def _mask_names(columns: Columns) -> list[str]:
    """The columns that are masks of parts: by their names, or `train`, `val` and `test` where these are true or false
    and some train."""
    names = [name for name in columns if _is(name, "|".join(_MASKS))]
    truths = [name for name in names if {word.lower() for word in as_words(columns[name])} <= {*_TRUTH, ""}]
    truths = truths if any(_is(name, _MASKS[0]) for name in truths) else []
    return [name for name in names if _is_mask(name) or name in truths]


def _is_mask(name: str) -> bool:
    return _plain(name).endswith("mask")


def _names_of_nodes(columns: Columns) -> list[str]:
    """Gephi's `Label` beside its `Id`: a name for each node and no class."""
    if not {"Id", "Label"} <= set(columns) or columns["Label"].dtype.kind not in "OUS":
        return []
    words = [word for word in as_words(columns["Label"]) if word not in MISSING]
    return ["Label"] if len(set(words)) == len(words) else []


def _sole(table: Table, columns: Collection[str], names: str, role: str) -> str | None:
    """The one of `columns` that is called one of `names`. Raises UserError where there are several."""
    several = [name for name in columns if _is(name, names)]
    if len(several) > 1:
        raise UserError(
            f"{table.shown} has the columns {' and '.join(repr(printable(name)) for name in several)}.",
            why=f"each could be the {role}",
            do=f"call one of them {role} and drop or rename the others",
        )
    return several[0] if several else None


def _taken(table: Table, columns: dict[str, Array], roles: Mapping[str, str], notes: list[str]) -> dict[str, Array]:
    """The columns of `roles`, taken out of `columns`. Where a name is not ours, `notes` say what it was taken for."""
    foreign = [f"{printable(name)!r} is the {role}" for role, name in roles.items() if name != role]
    if foreign and table.header:
        notes.append(f"columns of {table.path.name}: {', '.join(foreign)}")
    return {role: columns.pop(name) for role, name in roles.items()}


def settled(nodes: NodeTable, sources: Array, targets: Array) -> NodeTable:
    """`nodes` with its ids decided, where no column is called so, and its features as numbers.

    Distinct values are ids if the ends of edges are among them and cannot be row numbers. A column that counts the
    rows is left out. Raises UserError where both readings fit.
    """
    name = nodes.maybe
    notes = list(nodes.notes)
    if name is not None and _may_be_ids(nodes.features[name]):
        column = nodes.features[name]
        origin = nodes.table.path.name
        rest = {other: values for other, values in nodes.features.items() if other != name}
        called = nodes.table.header and (_plain(name) in _MAYBE_IDS or _ENDS_IN_ID.fullmatch(name) is not None)
        ends = alike(np.concatenate([sources, targets]))
        values = alike(column)
        numbers = values.dtype.kind == "i"
        words = ends.dtype.kind != "i"
        counts = numbers and np.array_equal(values, np.arange(len(values)))
        distinct = len(np.unique(values)) == len(values) and not counts
        rows = not words and bool(((ends >= 0) & (ends < len(values))).all())
        among = len(ends) > 0 and words != numbers and bool(np.isin(ends, values).all())
        if distinct and among and rows and not called:
            raise UserError(
                f"{nodes.table.shown} has no column id, and {printable(name)!r} may be it.",
                why="each row has another whole number there, and the ends of edges fit these as well as the rows",
                do=f"call the column id; where it is a feature, put a column id before it (0 to {len(values) - 1})",
            )
        if distinct and (among or (words and not numbers) or (called and not rows)):
            nodes = replace(nodes, ids=column, features=rest)
            notes.append(f"columns of {origin}: {printable(name)!r} is the id")
        elif counts or (called and numbers):
            nodes = replace(nodes, features=rest)
            notes.append(nodes.table.unused(name, f"{'it counts' if counts else 'edges name'} the rows"))
        elif distinct and numbers:
            notes.append(f"column {printable(name)!r} of {origin} is a feature: edges name the rows")
    texts: dict[str, Array] = {}
    features = _numeric(nodes.table, nodes.features, "the feature {} of nodes", notes, texts)
    return replace(nodes, features=features, texts=texts, notes=tuple(notes))


def _may_be_ids(column: Array) -> bool:
    return column.dtype.kind in "iuOUS" or (column.dtype.kind == "f" and bool((column == np.round(column)).all()))


def _parts(table: Table, column: Array | None, masks: Columns) -> DataSplit | None:
    if column is not None and masks:
        raise UserError(f"{table.shown} has a column of parts and masks.", do="drop the one or the other")
    if masks:
        chosen = [_sole(table, masks, names, "mask of a part") for names in _MASKS]
        truths = _TRUTH | {"": 0.0}
        do = "true or false for each node"
        each = [np.zeros(0) if name is None else _meant(table, (name, masks[name]), truths, do) for name in chosen]
        return DataSplit(*map(np.flatnonzero, each))
    if column is None:
        return None
    none = dict.fromkeys((word.lower() for word in (*MISSING, "-1")), "")
    named = _meant(table, ("part", column), none | PART_WORDS, "train, validation, test, or empty")
    return DataSplit(*(np.flatnonzero(named == name) for name in DataSplit._fields))


def _meant(table: Table, column: tuple[str, Array], meanings: Mapping[str, object], do: str) -> Array:
    """What each cell of a column, given with its name, stands for. Raises UserError where one is none of `meanings`."""
    name, cells = column
    words = [word.lower() for word in as_words(cells)]
    strange = set(words) - set(meanings)
    if strange:
        raise UserError(f"{table.shown}: {printable(name)} = {printable(min(strange))!r} is not possible.", do=do)
    return np.array([meanings[word] for word in words])


# --- edges -----------------------------------------------------------------------------------------------------------


def edges_of(table: Table) -> EdgeTable:
    """A table of edges, by the names of its columns. Raises UserError."""
    left = dict(table.columns)
    notes = list(table.notes)
    notes += _drop_kinds(table, left)
    ends = _ends(table, left)
    numbers = [name for name in left if name not in ends and table.header and _is(name, f"{_IDS}|edgeid|{_INDEX}")]
    notes += _drop(table, left, numbers, "a number for each edge")
    roles = {"source": ends[0], "target": ends[1]}
    if (weight := _sole(table, left, _WEIGHTS, "weight")) is not None:
        roles["weight"] = weight
    taken = _taken(table, left, roles, notes)
    types = _types(left)
    weights = taken.get("weight")
    if weights is not None:
        weights, reason = _as_float(weights, f"{table.shown}: weights")
        notes += [f"weights of {table.path.name}: {reason}"] if reason else []
        if reason.startswith("words"):
            raise UserError(f"{table.shown}: the weights are {reason}.", do="give numbers, or drop the column")
    if any(values.dtype.kind in "OU" and str(values[0]).startswith("{'") for values in left.values()):
        raise UserError(
            f"{table.shown} has attributes of edges as Python writes them.",
            do="networkx.write_weighted_edgelist, or source,target,weight lines",
        )
    features = _numeric(table, left, "the feature {} of edges", notes)
    if features and not table.header:
        notes.append(
            f"columns of {table.path.name} after the second are features of edges: "
            "write a line of names first where one is the weight"
        )
    return EdgeTable(table, taken["source"], taken["target"], weights, features, types, tuple(notes))


def _ends(table: Table, columns: Columns) -> tuple[str, str]:
    """The columns of both ends: by their names, else the first two."""
    ends = {role: _sole(table, columns, names, role) for role, names in (("source", _SOURCES), ("target", _TARGETS))}
    given = [name for name in ends.values() if name is not None]
    if len(given) > 1:
        return given[0], given[1]
    if given:
        missing = next(role for role, name in ends.items() if name is None)
        raise UserError(
            f"{table.shown} has a column {given[0]!r} and none for the other end of edges.",
            why=f"it has {printable(', '.join(columns))}",
            do=f"call the other column {missing}",
        )
    names = [name for name in columns if not table.header or not _is(name, f"{_WEIGHTS}|{_INDEX}")]
    if len(names) < 2:
        raise UserError(
            f"{table.shown} has {plural(len(columns), 'column')}.",
            why="an edge has two ends",
            do="columns source and target",
        )
    return names[0], names[1]


def _types(columns: dict[str, Array]) -> frozenset[str]:
    """What Gephi's `Type` says, Directed or Undirected; that column is taken out of `columns`."""
    for name in [name for name in columns if _plain(name) == "type"]:
        types = frozenset(word.lower() for word in as_words(columns[name]))
        if types <= {"directed", "undirected"}:
            del columns[name]
            return types
    return frozenset()


# --- cells -----------------------------------------------------------------------------------------------------------


def alike(ids: Array) -> Array:
    """Ids in the one form that can be compared: int64 where all are whole numbers, however stored, else text."""
    if ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    if ids.dtype.kind == "f" and (np.abs(ids) < EXACT).all() and (ids == np.round(ids)).all():
        return ids.astype(np.int64)
    words = as_words(ids)
    return np.array([int(word) for word in words] if all(map(WHOLE.fullmatch, words)) else words)


def _numeric(
    table: Table, columns: Columns, what: str, notes: list[str], texts: dict[str, Array] | None = None
) -> dict[str, Array]:
    """float64 columns of numbers. Columns of words alone are put into `texts`; without it, and where they have no
    letters or are lists, they are left out. Both are said in `notes`."""
    numbers = {}
    for name, column in columns.items():
        values, reason = _as_float(column, f"{table.shown}: {what.format(repr(printable(name)))}")
        has_letters = reason.startswith("words") and any(map(str.isalpha, "".join({*as_words(column)} - {*MISSING})))
        note = f"column {printable(name)!r} of {table.path.name} has {reason}"
        if texts is not None and has_letters and not str(column[0]).startswith(("[", "{")):
            texts[name] = column
            notes.append(note)
        elif values is None:
            notes.append(table.unused(name, reason))
        else:
            numbers[name] = values
            notes += [note] if reason else []
    return numbers


def _as_float(column: Array, what: str) -> tuple[Array | None, str]:
    """float64 values, or None and what the column has instead of numbers. Raises UserError where only some are."""
    if column.dtype.kind in "biuf":
        values = column.astype(np.float64)
        return (None, "no values") if len(values) and np.isnan(values).all() else (values, "")
    if column.dtype.kind not in "OUS":
        return None, f"values of {column.dtype}"
    words = as_words(column)
    filled = [word for word in words if word not in MISSING]
    if not filled:
        return None, "no values"
    lacks_none = filled == words
    if lacks_none and {word.lower() for word in words} <= {"true", "false"}:
        return np.array([_TRUTH[word.lower()] for word in words]), ""
    flags = [is_number(word) for word in filled]
    if lacks_none and all(flags):
        return np.array(words).astype(np.float64), ""
    if lacks_none and all(map(_DECIMAL.fullmatch, words)):
        return _decimal_commas(words, what), "decimal commas"
    if not any(flags):
        return None, f"words, such as {printable(filled[0], 40)!r}"
    word = next((word for word in words if not is_number(word)), "")
    raise UserError(f"{what} must be numbers, and one is {printable(word)!r}.", do="give numbers, or drop the column")


def _decimal_commas(words: list[str], what: str) -> Array:
    if all(len(word.partition(",")[2]) in (0, 3) for word in words):
        example = next(word for word in words if "," in word)
        raise UserError(
            f"{what} has {example!r}.", why="the comma may separate decimals or thousands", do="write decimal points"
        )
    return np.array([word.replace(",", ".") for word in words]).astype(np.float64)


def ends_as_numbers(values: Array, path: Path) -> Array:
    """float64 [edges]: the ends of edges where no table of nodes has ids. Raises UserError for words."""
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    words = as_words(values)
    word = next((word for word in words if not is_number(word)), None)
    if word is not None:
        raise UserError(
            f"{printable(path)}: ends of edges must be numbers, and one is {printable(word)!r}.",
            do="add a nodes table (nodes.csv) with a column id, in a folder with edges.csv",
        )
    return np.array(words).astype(np.float64)
