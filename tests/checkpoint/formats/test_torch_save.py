"""Malformed and hostile torch.save files are refused by name, and nothing in them runs."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import saved
from hypothesis import given
from hypothesis import strategies as st
from malformed import LISTS, Evil, archive, archive_pickle, refused

import loaderkit
from loaderkit.checkpoint.formats.plain_values import plain_names
from loaderkit.checkpoint.formats.restricted_pickle import load_pickle
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, LoaderkitError

pytestmark = pytest.mark.filterwarnings("ignore")


class TestTorchSave:
    @pytest.mark.parametrize("function", [os.system, eval, exec, __import__, getattr, open])
    def test_a_bomb_does_not_go_off_and_is_named(self, function: Any, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        argument = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w')"
        state = {"a": torch.ones(2), "b": Evil(function, argument)}
        (tmp_path / "x.pt").write_bytes(saved(state))
        with pytest.raises(CheckpointError, match=rf"'b' holds an object of \w+\.{function.__name__}"):
            loaderkit.restore(tmp_path / "x.pt")
        assert loaderkit.restore(tmp_path / "x.pt", keys="a")["a"].tolist() == [1, 1]
        assert not mark.exists()

    def test_nested_bombs(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        inner = Evil(os.system, f"touch {mark}")
        for state in ({"a": Evil(list, [inner])}, {"a": [{"b": Evil(map, inner, [1])}]}, Evil(Evil, inner), {inner: 1}):
            (tmp_path / "x.pt").write_bytes(saved(state))
            with pytest.raises(LoaderkitError):
                loaderkit.restore(tmp_path / "x.pt")
        assert not mark.exists()

    def test_stand_ins_cannot_be_changed(self) -> None:
        # GLOBAL torch.Size, then BUILD with attributes for it: it must neither work nor last.
        program = b"\x80\x02ctorch\nSize\n}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xsb."
        refused(archive(program), "x.pt", "x.pt")
        slots = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x09\x00\x00\x00_functionK\x01s\x86b."
        refused(archive(slots), "x.pt", "x.pt")

    def test_nothing_that_a_pickle_made_can_be_changed(self) -> None:
        for shadowed in (b"items", b"keys", b"__iter__", b"__class__"):
            of_table = b"\x80\x02ccollections\nOrderedDict\n)R}X%c\0\0\0%bNsb." % (len(shadowed), shadowed)
            restored = loaderkit.restore(
                "memory://x.pt", nested=True, connectors={"memory": MemoryConnector({"x.pt": archive(of_table)})}
            )
            assert restored == {}
            assert type(restored) in (dict, collections.OrderedDict)
        pickled = archive_pickle(saved({"a": torch.ones(2)}))
        assert pickled.endswith(b"s.")
        for state in (b"(NNNNNt", b"N", b"}"):  # of the tensor
            data = archive(pickled[:-2] + state + b"bs.", {"data/0": b"\0" * 8})
            refused(data, "it changes a tensor", "x.pt")

    def test_a_module_state_comes_back_as_it_was(self) -> None:
        state = torch.nn.Linear(2, 3).state_dict()
        data = saved({"model": state, "more": collections.OrderedDict(a=[1])})
        restored = loaderkit.restore(
            "memory://x.pt", nested=True, connectors={"memory": MemoryConnector({"x.pt": data})}
        )
        assert [*restored["model"]] == [*state]
        assert restored["more"] == {"a": [1]}
        values = loaderkit.restore(
            "memory://x.pt", keys="more.*", connectors={"memory": MemoryConnector({"x.pt": data})}
        )
        assert values == {"more.a": [1]}

    def test_a_table_inside_a_value_is_an_ordered_dict(self) -> None:
        data = saved({"a": torch.ones(2), "b": (collections.OrderedDict(x=1), {"y": 2})})
        restored = loaderkit.restore(
            "memory://x.pt", nested=True, connectors={"memory": MemoryConnector({"x.pt": data})}
        )
        assert [type(item) for item in [*restored["b"]]] in ([dict, dict], [collections.OrderedDict, dict])

    @pytest.mark.parametrize("put", [b"r\xff\xff\xff\xff", b"r\0\0\0\x10", b"p4000000000\n"])
    def test_an_object_stored_far_away(self, put: bytes) -> None:
        refused(archive(b"\x80\x02}" + put + b"."), "at a place that", "x.pt")

    @pytest.mark.parametrize(
        "cut", [b"cposix", b"cposix\nsystem", b"X\5\0\0\0ab", b"\x96\0\0\0\0\4\0\0\0", b"p12", b"K", b""]
    )
    def test_a_pickle_that_is_cut_short(self, cut: bytes) -> None:
        refused(archive(b"\x80\x02K\n0" + cut), "ends in the middle", "x.pt")

    @pytest.mark.parametrize("between", [b"", b"q\0h\0\x86", b"]Na\x86"])
    def test_tuples_that_are_too_deep_to_be_hashed(self, between: bytes) -> None:
        refused(archive(b"\x80\x02})" + (b"\x85" + between) * 300_000 + b"Ns."), "nested too deeply|a bomb", "x.pt")

    @pytest.mark.parametrize("width", [2, 3, 5])
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_tuples_whose_hash_would_not_end(self, protocol: int, width: int) -> None:
        nested: Any = ()
        for _ in range(40):
            nested = (nested,) * width
        as_key = (
            b"}"
            + re.sub(rb"^(\x80.)?(\x95.{8})?", b"", pickle.dumps(nested, protocol), flags=re.DOTALL)[:-1]
            + b"K\x01s."
        )
        refused(archive(b"\x80\x04" + as_key), "is a bomb", "x.pt")

    @pytest.mark.parametrize("again", [b"2\x86", b"q\1h\1\x86", b"q\0000q\1h\1h\1\x86", b"\x94h\0\x86q\0"])
    def test_tuples_whose_hash_would_not_end_by_other_orders(self, again: bytes) -> None:
        refused(archive(b"\x80\x04})q\0" + again * 60 + b"K\x01s."), "is a bomb|damaged|without running", "x.pt")

    @given(st.data())
    def test_shared_tuples_are_read(self, data: st.DataObject) -> None:
        leaves = st.sampled_from([(0.9, 0.999), (), ("a", 1), ((1, 2), (3,))])
        keys = st.dictionaries(st.one_of(leaves, st.text(max_size=3), st.integers()), st.lists(leaves), max_size=20)
        values = {"betas": [data.draw(leaves) for _ in range(30)], "table": data.draw(keys)}
        assert load_pickle(pickle.dumps(values, data.draw(st.integers(0, 5))), plain_names()) == values

    def test_many_tuples_are_no_deep_ones(self) -> None:
        state = {"a": torch.ones(2), "pairs": [(n, (n, str(n))) for n in range(20_000)]}
        for protocol in (2, 4):
            file = io.BytesIO()
            torch.save(state, file, pickle_protocol=protocol)
            connectors = {"memory": MemoryConnector({"x.pt": file.getvalue()})}
            assert loaderkit.restore("memory://x.pt", connectors=connectors)["pairs"] == state["pairs"]

    def test_more_unknown_names_than_any_checkpoint_has(self) -> None:
        names = b"".join(b"cx\nn%d\n0" % number for number in range(1001))
        refused(archive(b"\x80\x02" + names + b"}."), "more than 1000 classes", "x.pt")

    def test_bombs_of_size(self) -> None:
        state: Any = torch.ones(2)
        for _ in range(40):
            state = [state, state]
        refused(saved({"a": state}), "more than .* values", "x.pt")
        deep = b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 5000 + b"a" * 4999 + b"s."
        refused(archive(deep), "nested", "x.pt")
        table: Any = {}
        for _ in range(40):
            table = {"a": table, "b": table}
        refused(saved({"a": torch.ones(2), "t": table}), "more than .* values and tables", "x.pt")
        refused(saved({"a": torch.ones(2), 10**5000: 1}), "cannot be written", "x.pt")
        huge = b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."
        refused(archive(huge), "bytearray", "x.pt")

    def test_what_is_said_of_a_bomb_is_short(self) -> None:
        refused(archive(b"\x80\x02ctorch\nSize\n" + LISTS + b"\x85R."), "it has a size a list", "x.pt")

    def test_records_that_share_bytes(self) -> None:
        whole = bytearray(archive(b"\x80\x02}.", {"data/0": b"\0" * 80, "data/1": b"\0" * 80}))
        headers = [place for place in range(len(whole)) if whole[place : place + 4] == b"PK\3\4"]
        entries = [place for place in range(len(whole)) if whole[place : place + 4] == b"PK\1\2"]

        shared = whole.copy()
        shared[entries[2] + 42 : entries[2] + 46] = struct.pack("<L", headers[1])
        refused(bytes(shared), r"'x/data/[01]' .* where the next begins", "x.pt")

    def test_a_record_that_begins_late_or_is_another(self) -> None:
        whole = bytearray(saved({"a": torch.ones(2), "b": torch.ones(2)}))
        place = whole.index(b"/data/0") + len("/data/")
        other = whole.copy()
        other[place : place + 1] = b"7"
        refused(bytes(other), r"'archive/data/0' is not where its directory says", "x.pt")
        header = whole.rindex(b"PK\3\4", 0, place)
        (padding,) = struct.unpack_from("<H", whole, header + 28)
        late = whole.copy()
        struct.pack_into("<H", late, header + 28, padding + 100)
        refused(bytes(late), r"'archive/data/0' .* into the next", "x.pt")

    def test_a_packed_archive_is_refused(self) -> None:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("x/data.pkl", b"\0" * 10_000_000)
        refused(packed.getvalue(), "packed", "x.pt")

    def test_a_file_of_another_kind_of_zip(self) -> None:
        other = io.BytesIO()
        with zipfile.ZipFile(other, "w") as file:
            file.writestr("hello", "x")
        refused(other.getvalue(), "no data.pkl", "x.pt")

    def test_a_legacy_file_is_refused(self) -> None:
        file = io.BytesIO()
        torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
        refused(file.getvalue(), "older than torch 1.6", "x.pt")

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
    def test_a_file_cut_short(self, share: float) -> None:
        whole = saved({"a": torch.ones(2), "b": torch.ones(1000)})
        refused(whole[: int(share * len(whole))], "not a whole zip", "x.pt")

    def test_a_tensor_beyond_its_storage(self) -> None:
        whole = saved({"a": torch.ones(2)})
        pickled = archive_pickle(whole).replace(b"K\x02\x85", b"K\x09\x85")  # size 9 of 2
        refused(archive(pickled, {"data/0": b"\0" * 8}), "beyond its storage", "x.pt")

    def test_every_byte_of_the_description_flipped(self) -> None:
        whole = saved({"a": torch.ones(2), "b": [1, {"c": torch.zeros(3)}]})
        for place in range(len(whole)):
            data = bytearray(whole)
            data[place] ^= 0xFF
            with contextlib.suppress(LoaderkitError):  # nothing else, and no crash
                loaderkit.restore("memory://x.pt", connectors={"memory": MemoryConnector({"x.pt": bytes(data)})})

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
            lambda: torch.ones(2, dtype=torch.complex64).conj(),
            lambda: np.array(["a", "bc"]),
            lambda: np.array([1, "a"], object),
            lambda: np.zeros(2, [("x", "f4")]),
            lambda: np.str_("x"),
            lambda: np.datetime64("2020-01-01"),
            lambda: np.dtype("U3"),
        ],
        ids=["quantized", "conjugated", "texts", "objects", "records", "text", "date", "dtype"],
    )
    @pytest.mark.filterwarnings("ignore:.*[qQ]uantiz")
    def test_what_is_no_plain_value_blocks_nothing_else(self, make: Callable[[], Any], tmp_path: Path) -> None:
        weights = torch.randn(3, 2)
        torch.save({"weights": weights, "more": [1, {"odd": make()}]}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"'more[.0-9a-z]*' holds .*leave it out with `keys`"):
            loaderkit.restore(tmp_path / "a.pt")
        assert torch.equal(loaderkit.restore(tmp_path / "a.pt", keys=["weights"])["weights"], weights)


class TestReferences:
    """A state that holds a class or a function itself, no object made by it."""

    @pytest.mark.parametrize(
        ("what", "named"),
        [
            (torch.nn.ReLU, r"torch\.nn\.modules\.activation\.ReLU"),
            (os.system, r"posix\.system"),
            (collections.OrderedDict, r"collections\.OrderedDict"),
            (torch.Tensor, r"torch\.Tensor"),
            (torch.FloatStorage, r"torch\.FloatStorage"),
            (torch.Size, r"torch\.Size"),
            (torch.ones(2).untyped_storage(), r"torch\.UntypedStorage"),
            ({torch.ones(2)}, r"torch\.Tensor"),
            ([1, (torch.nn.ReLU,)], r"torch\.nn\.modules\.activation\.ReLU"),
        ],
    )
    def test_is_refused_by_name(self, what: Any, named: str) -> None:
        data = saved({"w": torch.ones(2), "hparams": {"act": what}})
        connectors = {"memory": MemoryConnector({"x.pt": data})}
        into = {"w": torch.zeros(2), "hparams": {"act": torch.nn.GELU}}
        for target in (None, into):
            with pytest.raises(CheckpointError, match=rf"'hparams\.act' holds an object of {named}"):
                loaderkit.restore("memory://x.pt", target, connectors=connectors)
        assert into == {"w": into["w"], "hparams": {"act": torch.nn.GELU}}
        assert loaderkit.restore("memory://x.pt", keys="w", connectors=connectors)["w"].tolist() == [1, 1]

    def test_of_a_pickle_that_is_nothing_else(self) -> None:
        connectors = {"memory": MemoryConnector({"x.pt": archive(b"cposix\nsystem\n.")})}
        with pytest.raises(CheckpointError, match=r"'tensor' holds an object of posix\.system"):
            loaderkit.restore("memory://x.pt", connectors=connectors)

    @pytest.mark.parametrize("key", [torch.nn.ReLU, (1, torch.nn.ReLU), torch.ones(2)])
    def test_as_a_key(self, key: Any) -> None:
        refused(saved({"a": torch.ones(2), key: 1}), "a key in", "x.pt")

    def test_a_type_of_numpy_comes_out_as_it_is(self) -> None:
        data = saved({"kind": np.dtype(">f4"), "number": np.float32(3)})
        restored = loaderkit.restore("memory://x.pt", connectors={"memory": MemoryConnector({"x.pt": data})})
        assert restored == {"kind": np.dtype(">f4"), "number": np.float32(3)}
        assert isinstance(restored["kind"], np.dtype)
