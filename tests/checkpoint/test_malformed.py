"""Malformed, partial and hostile checkpoints: each is refused by name, nothing is executed, and nothing is written to."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_states import pack, save_dcp, saved
from hypothesis import given
from hypothesis import strategies as st

import loaderkit
from loaderkit.checkpoint.formats.restricted_pickle import load_pickle, plain_names
from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import AccessDeniedError, CheckpointError, ExpiredCredentialsError, FormatError, LoaderkitError

pytestmark = pytest.mark.filterwarnings("ignore")


def with_header(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(data: bytes, match: str, name: str = "x.safetensors") -> None:
    """Both ways refuse it: into new tensors, and into given ones, which stay as they are."""
    connectors = {"memory": MemoryConnector({name: data})}
    target = torch.full((2,), 3.0)
    for into in (None, {"a": target}):
        with pytest.raises(LoaderkitError, match=match) as caught:
            loaderkit.restore(f"memory://{name}", into, connectors=connectors)
        assert name in str(caught.value)
    assert target.tolist() == [3, 3]


class TestSafetensors:
    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (struct.pack("<Q", 2**40) + b"{", "claims 1099511627776 bytes"),
            (struct.pack("<Q", 90_000_000) + b"{}", "its header ends at byte 90000008"),
            (with_header(b"{]"), "no JSON"),
            (with_header(b"{" + b'"a":[' * 100_000), "no JSON"),
            (with_header({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "overlap"),
            (with_header({"a": entry(offsets=(8, 16))}, b"\0" * 16), "does not begin"),
            (with_header({"a": entry(), "b": entry(offsets=(16, 24))}, b"\0" * 24), "hole"),
            (with_header({"a": entry(shape=(3,))}), "takes 12 bytes"),
            (with_header({"a": entry(shape=(-2,))}), "not lists of whole numbers"),
            (with_header({"a": entry(shape=(2**40, 2**40), offsets=(0, 2**62))}), "takes"),
            (with_header({"a": entry(dtype="F33")}), "F33"),
            (with_header({"a": {"dtype": "F32"}}), "no dtype, shape"),
            (with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}'), "'a' twice"),
            (with_header({"a": entry()}, b"\0" * 7), "'a' ends at byte"),
            (with_header({"a": entry()}, b"\0" * 9), "1 bytes after"),
            (b"\1\0\0", "truncated"),
            (with_header({"a": entry(shape=[1] * 65)}), "65 dimensions"),
            (with_header({"a": entry(shape=(0, 2**62, 4), offsets=(0, 0))}, b""), "takes"),
            (with_header(("{" + ",".join(f'"{n % 200_000}":1' for n in range(200_001)) + "}").encode()), "'0' twice"),
        ],
    )
    def test_refuses(self, data: bytes, match: str) -> None:
        refused(data, match)


class Evil:
    """Pickled, it calls something when it is unpickled the usual way."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


# [x, x] of the last, again and again: its text would have 2**60 letters
LISTS = b"]q\0" + b"".join(b"0(h%ch%clq%c" % (n, n, n + 1) for n in range(60))


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
            found = loaderkit.restore(
                "memory://x.pt", nested=True, connectors={"memory": MemoryConnector({"x.pt": archive(of_table)})}
            )
            assert found == {}
            assert type(found) in (dict, collections.OrderedDict)
        pickled = archive_pickle(saved({"a": torch.ones(2)}))
        assert pickled.endswith(b"s.")
        for state in (b"(NNNNNt", b"N", b"}"):  # of the tensor
            data = archive(pickled[:-2] + state + b"bs.", {"data/0": b"\0" * 8})
            refused(data, "it changes a tensor", "x.pt")

    def test_a_module_state_comes_back_as_it_was(self) -> None:
        state = torch.nn.Linear(2, 3).state_dict()
        data = saved({"model": state, "more": collections.OrderedDict(a=[1])})
        found = loaderkit.restore("memory://x.pt", nested=True, connectors={"memory": MemoryConnector({"x.pt": data})})
        assert [*found["model"]] == [*state]
        assert found["more"] == {"a": [1]}
        values = loaderkit.restore(
            "memory://x.pt", keys="more.*", connectors={"memory": MemoryConnector({"x.pt": data})}
        )
        assert values == {"more.a": [1]}

    def test_a_table_inside_a_value_is_an_ordered_dict(self) -> None:
        data = saved({"a": torch.ones(2), "b": (collections.OrderedDict(x=1), {"y": 2})})
        found = loaderkit.restore("memory://x.pt", nested=True, connectors={"memory": MemoryConnector({"x.pt": data})})
        assert [type(item) for item in [*found["b"]]] in ([dict, dict], [collections.OrderedDict, dict])

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
        state = {"a": torch.ones(2), "pairs": [(n, (n, str(n))) for n in range(60_000)]}
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


def archive(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A zip as torch.save makes it, with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("x/data.pkl", pickled)
        for name, data in (records or {}).items():
            writer.writestr(f"x/{name}", data)
    return file.getvalue()


def archive_pickle(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


class TestDistributed:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_dcp({"a": torch.ones(2), "big": torch.ones(200_000), "k": 3}, tmp_path / "step-1")
        return tmp_path / "step-1"

    def refused(self, folder: Path, match: str) -> None:
        into = {"a": torch.zeros(2), "big": torch.zeros(200_000), "k": 0}
        for target in (None, into):
            with pytest.raises((CheckpointError, FormatError), match=match):
                loaderkit.restore(folder, target)
        assert not into["a"].any()  # type: ignore[attr-defined]
        assert into["k"] == 0

    def test_not_committed(self, folder: Path) -> None:
        (folder / ".metadata").unlink()
        self.refused(folder, "not committed")

    def test_metadata_whose_text_is_a_bomb(self, folder: Path) -> None:
        (folder / ".metadata").write_bytes(b"\x80\x02" + LISTS + b".")
        self.refused(folder, "no Metadata of torch.distributed.checkpoint, but a list")

    def test_a_missing_file(self, folder: Path) -> None:
        (folder / "__0_0.distcp").unlink()
        self.refused(folder, r"not whole.*__0_0\.distcp")

    def test_a_short_file(self, folder: Path) -> None:
        os.truncate(folder / "__0_0.distcp", 5000)
        self.refused(folder, r"not whole: __0_0\.distcp has 5000 bytes")

    def test_metadata_that_is_a_bomb(self, folder: Path, tmp_path: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(os.system, f"touch {tmp_path}/mark")))
        self.refused(folder, "no Metadata")
        assert not (tmp_path / "mark").exists()

    def test_metadata_that_leads_out(self, folder: Path) -> None:
        data = (folder / ".metadata").read_bytes()
        assert b"__0_0.distcp" in data
        (folder / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
        self.refused(folder, "leads out")

    def test_a_value_that_is_a_bomb(self, tmp_path: Path) -> None:
        save_dcp({"a": torch.ones(2), "k": Evil(os.system, f"touch {tmp_path}/mark")}, tmp_path / "step-2")
        with pytest.raises(CheckpointError, match=r"'k' holds an object of posix\.system"):
            loaderkit.restore(tmp_path / "step-2")
        assert loaderkit.restore(tmp_path / "step-2", keys="a")["a"].tolist() == [1, 1]
        assert not (tmp_path / "mark").exists()


class TestDirectories:
    def test_absolute_names_in_an_archive(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            for name in ("/abs/y.safetensors", "x.safetensors"):
                data = safetensors.torch.save({name[-13:]: torch.ones(2)})
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        assert [*loaderkit.restore(tmp_path / "x.tar")] == ["x.safetensors"]

    @pytest.mark.parametrize("root", ["../", "/abs/", "step-1/../../", ""])
    def test_members_of_an_archive_that_lead_out(self, tmp_path: Path, root: str) -> None:
        """What is restored are the archive's own bytes, whatever lies where the names lead; nothing is written there."""
        outside = safetensors.torch.save({"secret": torch.ones(2)})
        for place in (tmp_path / "x.safetensors", tmp_path / "link.safetensors"):
            place.write_bytes(outside)
        inside = safetensors.torch.save({"w": torch.zeros(2)})
        (tmp_path / "runs").mkdir()
        with tarfile.open(tmp_path / "runs/x.tar", "w") as tar:
            member = tarfile.TarInfo(f"{root}x.safetensors")
            member.size = len(inside)
            tar.addfile(member, io.BytesIO(inside))
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                link = tarfile.TarInfo(f"{root}link.safetensors")
                link.type, link.linkname = kind, str(tmp_path / "link.safetensors")
                tar.addfile(link)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert loaderkit.restore(tmp_path / "runs/x.tar")["w"].tolist() == [0, 0]
        with pytest.raises(CheckpointError, match="no manifest can be written there"):
            loaderkit.checkpoint.write_manifest(tmp_path / "runs/x.tar")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_two_formats(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
        torch.save({"a": torch.ones(2)}, tmp_path / "optimizer.pt")
        with pytest.raises(CheckpointError, match=r"two formats.*safetensors.*torch\.save"):
            loaderkit.restore(tmp_path)
        assert loaderkit.restore(tmp_path / "optimizer.pt")["a"].tolist() == [1, 1]

    def test_a_name_in_two_files(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
        with pytest.raises(CheckpointError, match="'w' is in another file"):
            loaderkit.restore(tmp_path)

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
    def test_an_index_that_leads_out(self, tmp_path: Path, file: str) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(FormatError, match="no file beside it"):
            loaderkit.restore(tmp_path)

    def test_an_index_without_its_files(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
        names = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps(names))
        with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing, such as 'm-2\.safetensors'"):
            loaderkit.restore(tmp_path)
        (tmp_path / "m-1.safetensors").unlink()
        with pytest.raises(CheckpointError, match="none of its files"):
            loaderkit.restore(tmp_path)

    @pytest.mark.parametrize("there", [(1, 2, 3), (2, 3, 4, 5), (1, 2, 4, 5), (0, 1, 2, 3), (5,)])
    def test_shards_without_their_index(self, tmp_path: Path, there: tuple[int, ...]) -> None:
        for n in there:
            safetensors.torch.save_file({f"w{n}": torch.ones(2)}, tmp_path / f"model-0000{n}-of-00005.safetensors")
        missing = next(n for n in range(0 if 0 in there else 1, 6) if n not in there)
        with pytest.raises(
            CheckpointError, match=rf"not whole.*{len(there)} of 5 shards; 'model-0000{missing}-of-00005"
        ):
            loaderkit.restore(tmp_path)
        file = tmp_path / f"model-0000{there[0]}-of-00005.safetensors"
        assert [*loaderkit.restore(file)] == [f"w{there[0]}"]  # this one was asked for

    @pytest.mark.parametrize("first", [0, 1])
    def test_all_shards_without_their_index(self, tmp_path: Path, first: int) -> None:
        for n in range(first, first + 3):
            safetensors.torch.save_file({f"w{n}": torch.ones(2)}, tmp_path / f"model-{n}-of-3.safetensors")
        assert len(loaderkit.restore(tmp_path)) == 3

    def test_one_torch_save_file_of_two(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
        with pytest.raises(CheckpointError, match=r"'pytorch_model-00002-of-00002\.bin' is missing"):
            loaderkit.restore(tmp_path)

    def test_an_index_that_names_a_tensor_there_is_not(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
        names = {"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors"}}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps(names))
        with pytest.raises(CheckpointError, match="no tensor 'b'"):
            loaderkit.restore(tmp_path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such file"):
            loaderkit.restore(tmp_path / "none")
        (tmp_path / "notes").write_text("hello")
        with pytest.raises(CheckpointError, match="no checkpoint"):
            loaderkit.restore(tmp_path)


class TestManifest:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        state = {"a": torch.ones(2), "big": torch.arange(400_000.0)}
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path)
        return tmp_path / "m.safetensors"

    def test_a_flipped_byte_is_named_with_its_tensor_and_range(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[1_000_000] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            CheckpointError, match=r"'big' is damaged: bytes 786432 to 1048576 of .*m\.safetensors.*read twice"
        ):
            loaderkit.restore(path.parent)
        into = {"a": torch.zeros(2), "big": torch.zeros(400_000)}
        with pytest.raises(CheckpointError) as caught:
            loaderkit.restore(path.parent, into)
        assert {name for name, tensor in into.items() if tensor.any()} <= set(caught.value.touched)
        assert loaderkit.restore(path.parent, verify=False)["big"].shape == (400_000,)

    def test_what_was_written_to_is_named(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2), "z": torch.ones(5_000_000)}, tmp_path / "m.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path)
        with open(tmp_path / "m.safetensors", "r+b") as file:
            file.seek(15_000_000)
            file.write(b"\1")
        into = {"a": torch.zeros(2), "z": torch.zeros(5_000_000)}
        with pytest.raises(CheckpointError, match="'z' is damaged") as caught:
            loaderkit.restore(tmp_path, into)
        assert "z" in caught.value.touched
        assert "written to already" in caught.value.__notes__[0]

    def test_a_flipped_byte_of_the_header(self, path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"big"', b'"bag"'))
        with pytest.raises(CheckpointError, match="description"):
            loaderkit.restore(path.parent)

    def test_a_file_replaced_or_cut(self, path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, path)
        with pytest.raises(CheckpointError, match="cut short, or was replaced"):
            loaderkit.restore(path.parent)

    def test_is_demanded(self, path: Path) -> None:
        assert loaderkit.restore(path.parent, verify=True)["a"].tolist() == [1, 1]
        (path.parent / "loaderkit-manifest.json").unlink()
        with pytest.raises(CheckpointError, match="has no manifest"):
            loaderkit.restore(path.parent, verify=True)

    @pytest.mark.parametrize("state", [{"step": 12}, {"step": 12, "none": torch.ones(0)}, {}])
    @pytest.mark.parametrize("verify", ["auto", True])
    def test_covers_a_file_without_tensors(self, tmp_path: Path, state: Any, verify: Any) -> None:
        torch.save(state, tmp_path / "state.pt")
        manifest = loaderkit.checkpoint.write_manifest(tmp_path / "state.pt")
        assert [len(item["hashes"]) for item in manifest["objects"].values()] == [1]
        assert loaderkit.restore(tmp_path / "state.pt", verify=verify).keys() == state.keys()
        data = bytearray((tmp_path / "state.pt").read_bytes())
        data[60] ^= 1  # padding behind the header of the first record: no reader looks at it
        (tmp_path / "state.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
            loaderkit.restore(tmp_path / "state.pt", verify=verify)

    @pytest.mark.parametrize("verify", ["auto", True])
    def test_names_a_file_that_is_gone(self, tmp_path: Path, verify: Any) -> None:
        for name in ("a", "b"):
            safetensors.torch.save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path)
        (tmp_path / "b.safetensors").unlink()
        with pytest.raises(
            CheckpointError, match=r"not whole: its manifest has '.*b\.safetensors', and there is no such file"
        ):
            loaderkit.restore(tmp_path, verify=verify)
        assert set(loaderkit.restore(tmp_path, verify=False)) == {"a"}

    def test_that_is_empty_covers_nothing(self, tmp_path: Path) -> None:
        torch.save({"step": 12}, tmp_path / "state.pt")
        manifest = loaderkit.checkpoint.write_manifest(tmp_path / "state.pt") | {"objects": {}}
        (tmp_path / "state.pt.loaderkit-manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="the manifest does not have it"):
            loaderkit.restore(tmp_path / "state.pt", verify=True)

    def test_where_one_may_read_and_not_list(self, caplog: pytest.LogCaptureFixture) -> None:
        """S3 answers 403 for what does not exist to who has s3:GetObject alone."""

        class Closed(MemoryConnector):
            error: type[Exception] = AccessDeniedError

            def stat(self, key: str) -> ObjectInfo:
                if "manifest" in key:
                    raise self.error(f"{key}: 403")
                return super().stat(key)

        data = safetensors.torch.save({"a": torch.ones(2)})
        closed = Closed({"m": data, "s/m": data, "s/loaderkit-manifest.json": b"{}"})
        assert loaderkit.restore("memory://m", connectors={"memory": closed})["a"].tolist() == [1, 1]
        assert [record.getMessage() for record in caplog.records if record.name == "loaderkit"] == [
            "memory://m is taken to have no manifest, so nothing is compared: m.loaderkit-manifest.json: 403"
        ]
        with pytest.raises(AccessDeniedError):
            loaderkit.restore("memory://m", verify=True, connectors={"memory": closed})
        with pytest.raises(AccessDeniedError):  # here it is known to exist
            loaderkit.restore("memory://s", connectors={"memory": closed})
        closed.error = ExpiredCredentialsError
        with pytest.raises(ExpiredCredentialsError):
            loaderkit.restore("memory://m", connectors={"memory": closed})

    def test_goes_with_the_checkpoint_into_a_tar(self, path: Path, tmp_path: Path) -> None:
        pack(sorted(path.parent.iterdir()), path.parent, tmp_path / "all.tar")
        assert loaderkit.restore(tmp_path / "all.tar", verify=True)["a"].tolist() == [1, 1]

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "hash": "md5"}', '{"version": 1}'])
    def test_that_is_none(self, path: Path, text: str) -> None:
        (path.parent / "loaderkit-manifest.json").write_text(text)
        with pytest.raises(FormatError, match="no manifest of loaderkit"):
            loaderkit.restore(path.parent)


class TestLatest:
    def test_is_the_newest_that_is_whole(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for step in (9, 10, 100):
            save_dcp({"a": torch.full((2,), float(step))}, tmp_path / f"step-{step}")
        (tmp_path / "log.txt").write_text("x")
        assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/step-100"
        (tmp_path / "step-100/.metadata").unlink()
        assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/step-10"
        assert "step-100 is skipped" in caplog.text
        assert "not committed" in caplog.text
        (tmp_path / "step-101").mkdir()
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "step-101/model-00001-of-00002.safetensors")
        assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/step-10"
        shutil.rmtree(tmp_path / "step-101")
        shutil.rmtree(tmp_path / "step-10")
        shutil.rmtree(tmp_path / "step-9")
        with pytest.raises(CheckpointError, match=r"no complete checkpoint.*\n.*not committed"):
            loaderkit.checkpoint.latest(tmp_path)
