"""Each format on a sample of what was published, and the errors for wrong lines."""

import json
import lzma
from pathlib import Path

import pytest

from maitred.core.errors import InvalidRequest
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.traces.agentic import read_agentic
from maitred.load.workload.traces.azure import read_azure
from maitred.load.workload.traces.burstgpt import read_burstgpt
from maitred.load.workload.traces.mooncake import read_mooncake
from maitred.load.workload.traces.recorded import RecordedRequest, read_recorded, recorded_sessions, write_recorded
from maitred.load.workload.traces.servegen import ServeGenSelection, read_servegen

DATA = Path(__file__).parents[3] / "data" / "traces"


def test_mooncake():
    workload = read_mooncake(DATA / "mooncake.jsonl")
    sessions = list(workload.sessions)
    rows = [json.loads(line) for line in (DATA / "mooncake.jsonl").read_text().splitlines()]
    assert workload.block_tokens == 512
    assert [list(s.turns[0].blocks) for s in sessions] == [row["hash_ids"] for row in rows]
    assert [s.turns[0].prompt_tokens for s in sessions] == [row["input_length"] for row in rows]
    late_ms = [s.at_s * 1000 - row["timestamp"] for s, row in zip(sessions, rows, strict=True)]
    assert min(late_ms) == pytest.approx(0)
    assert max(late_ms) < 3000
    assert len({s.at_s for s in sessions}) == len(rows)
    assert [s.at_s for s in sessions] == sorted(s.at_s for s in sessions)


def test_compressed_files_are_read_as_they_are(tmp_path):
    path = tmp_path / "m.jsonl.xz"
    path.write_bytes(lzma.compress((DATA / "mooncake.jsonl").read_bytes()))
    assert list(read_mooncake(path).sessions) == list(read_mooncake(DATA / "mooncake.jsonl").sessions)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InvalidRequest, match="cut short"):
        list(read_mooncake(path).sessions)


def test_azure():
    sessions = list(read_azure(DATA / "azure.csv.gz").sessions)
    assert len(sessions) == 100
    assert sessions[0].at_s == 0
    assert sessions[0].turns == (SessionTurn(prompt_tokens=374, output_tokens=44),)
    # 18:15:46.6805900 and 18:15:50.9951690
    assert sessions[1].at_s == pytest.approx(4.314579, abs=2e-6)


def test_burstgpt_leaves_failed_requests_out():
    sessions = list(read_burstgpt(DATA / "burstgpt.csv").sessions)
    assert len(sessions) == 38
    assert sessions[0].at_s == 0
    assert [session.id for session in sessions] == list(range(38))


def test_agentic_sessions_grow_and_share_with_themselves_alone():
    workload = read_agentic(DATA / "agentic.jsonl.xz")
    sessions = list(workload.sessions)
    assert workload.block_tokens == 64
    assert {session.at_s for session in sessions} == {None}
    own = [{block for turn in session.turns for block in turn.blocks} for session in sessions]
    assert sum(map(len, own)) == len(set.union(*own))
    with lzma.open(DATA / "agentic.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    inner = [sum(len(request.get("requests", [0])) for request in row["requests"]) for row in rows]
    assert [len(session.turns) for session in sessions] == inner
    for session in sessions:
        for turn in session.turns:
            assert (len(turn.blocks) - 1) * 64 < turn.prompt_tokens <= len(turn.blocks) * 64
    first, second = sessions[0].turns[:2]
    assert first.blocks[:-1] == second.blocks[: len(first.blocks) - 1]
    assert second.think_s == rows[0]["requests"][1]["think_time"]


def servegen(options="", seed=0):
    return list(read_servegen(DATA / "servegen.tar.xz", ServeGenSelection.parse(options), seed).sessions)


def test_servegen_follows_the_rates_of_its_clients():
    sessions = servegen("start=6000&end=12000")
    counts = {name: sum(s.tenant == name for s in sessions) for name in {s.tenant for s in sessions}}
    assert len(counts) == 3
    assert all(0 <= s.at_s < 6000 for s in sessions)
    assert [s.at_s for s in sessions] == sorted(s.at_s for s in sessions)
    assert [s.id for s in sessions] == list(range(len(sessions)))


def test_servegen_can_be_given_a_mean_rate():
    assert len(servegen("end=6000&rate=2")) == pytest.approx(12_000, rel=0.1)


def test_servegen_reads_a_folder_as_well(tmp_path):
    import tarfile

    with tarfile.open(DATA / "servegen.tar.xz") as archive:
        for member in archive.getmembers():
            (tmp_path / Path(member.name).name).write_bytes(archive.extractfile(member).read())
    part = ServeGenSelection.parse("end=1200")
    assert list(read_servegen(tmp_path, part, 1).sessions) == servegen("end=1200", seed=1)


def test_servegen_lends_lengths_to_clients_without_any(tmp_path):
    def client(number, rate, lengths):
        (tmp_path / f"chunk-{number}-trace.csv").write_text(f"0,{rate},1,Gamma,1,1\n600,0,0,,0,0\n")
        if lengths:
            table = {"0": {"input_tokens": lengths, "output_tokens": "{9: 1.0}"}}
            (tmp_path / f"chunk-{number}-dataset.json").write_text(json.dumps(table))

    client(0, 3, "{10: 0.5, 20: 0.5}")
    client(1, 1, "{30: 1.0}")
    client(2, 10, None)
    sessions = list(read_servegen(tmp_path, ServeGenSelection(), 0).sessions)
    lent = [s.turns[0].prompt_tokens for s in sessions if s.tenant == "client-2"]
    assert {s.turns[0].prompt_tokens for s in sessions if s.tenant == "client-0"} == {10, 20}
    assert lent.count(30) / len(lent) == pytest.approx(0.25, abs=0.03)
    assert all(s.at_s < 600 for s in sessions)


@pytest.mark.parametrize("options", ["begin=3", "start", "start=x", "start=5&end=5", "rate=0", "start=-1", "start=nan"])
def test_servegen_options_are_checked(options):
    with pytest.raises(InvalidRequest, match="start=86400"):
        ServeGenSelection.parse(options)


def test_servegen_says_when_there_is_nothing(tmp_path):
    with pytest.raises(InvalidRequest, match="no files like chunk-0-trace"):
        read_servegen(tmp_path, ServeGenSelection(), 0)
    with pytest.raises(InvalidRequest, match="no requests in this part"):
        servegen("start=9999999")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_servegen(tmp_path / "none.tar", ServeGenSelection(), 0)


LINES = [
    (read_mooncake, '{"timestamp": 0}\n', "line 1: Object missing required field"),
    (read_mooncake, "nonsense\n", "line 1: JSON is malformed"),
    (read_mooncake, '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "512 tokens each"),
    (
        read_mooncake,
        '{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
        '{"timestamp": 3, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n',
        "line 2: the timestamp is before",
    ),
    (read_azure, "TIMESTAMP,ContextTokens\n", "columns `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`"),
    (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2: 'noon' is no date and time"),
    (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.1,-1,2\n", "line 2: '-1' should be"),
    (
        read_azure,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,1,2\n2023-11-16 18:00:00,1,2\n",
        "line 3: TIMESTAMP is before",
    ),
    (read_burstgpt, "Timestamp,Request tokens,Response tokens\n1,2,3\n0,2,3\n", "line 3: Timestamp is before"),
    (read_agentic, '{"requests": [{"in": 5, "out": 1, "h": [[1]]}]}\n', "line 1: Expected `array` of length 2"),
    (read_recorded, '{"format": "other/1"}\n', "neither a recorded trace"),
    (read_recorded, "id,turns\n", "neither a recorded trace"),
    (read_recorded, '{"format": "maitred-trace/1"}\n{"id": 0, "turns": []}\n', "line 2: the session has no turns"),
    (
        read_recorded,
        '{"format": "maitred-trace/1"}\n{"id": 0, "turns": [{"prompt_tokens": 0, "output_tokens": 1}]}\n',
        "line 2: a length is below 1",
    ),
]


@pytest.mark.parametrize(("read", "text", "reason"), LINES)
def test_a_wrong_line_is_reported_by_file_and_number(tmp_path, read, text, reason):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as raised:
        list(read(path).sessions)
    assert str(path) in raised.value.message
    assert reason in raised.value.message


def test_a_file_that_is_being_written_is_not_there_yet(tmp_path):
    def broken():
        yield LoadSession(id=0, turns=(SessionTurn(prompt_tokens=1, output_tokens=1),))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_recorded(tmp_path / "t.jsonl", Workload(broken()))
    assert not (tmp_path / "t.jsonl").exists()


REQUESTS = [
    RecordedRequest(
        session=4, turn=0, tenant="b", intended_s=2.0, ended_s=3.0, prompt_tokens=50, output_tokens=9, asked_tokens=9
    ),
    RecordedRequest(
        session=2, turn=1, tenant="a", intended_s=4.5, ended_s=6.0, prompt_tokens=130, output_tokens=8, asked_tokens=10
    ),
    RecordedRequest(
        session=2, turn=0, tenant="a", intended_s=3.0, ended_s=4.0, prompt_tokens=100, output_tokens=20, asked_tokens=22
    ),
    RecordedRequest(
        session=7, turn=0, tenant="a", intended_s=9.0, ended_s=9.1, prompt_tokens=0, output_tokens=0, asked_tokens=5
    ),
]


def test_a_runs_requests_become_its_sessions_again():
    assert list(recorded_sessions(REQUESTS)) == [
        LoadSession(id=0, turns=(SessionTurn(prompt_tokens=50, output_tokens=9),), tenant="b", at_s=2.0),
        LoadSession(
            id=1,
            turns=(
                SessionTurn(prompt_tokens=100, output_tokens=22),
                SessionTurn(prompt_tokens=10, output_tokens=10, think_s=0.5),
            ),
            tenant="a",
            at_s=3.0,
        ),
        # The server never said how long this prompt was: as long as the median of the others.
        LoadSession(id=2, turns=(SessionTurn(prompt_tokens=50, output_tokens=5),), tenant="a", at_s=9.0),
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_result_file_is_a_trace(tmp_path, indent):
    columns = {name: [getattr(asked, name) for asked in REQUESTS] for name in RecordedRequest._fields}
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"format": "maitred-load/1", "spec": {}, "requests": columns}, indent=indent))
    assert [s.turns[0].output_tokens for s in read_recorded(path).sessions] == [9, 22, 5]
    columns["turn"] = columns["turn"][:-1]
    path.write_text(json.dumps({"format": "maitred-load/1", "requests": columns}))
    with pytest.raises(InvalidRequest, match="damaged result"):
        read_recorded(path)
