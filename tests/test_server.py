"""Regenerating through servers that fail, stall, answer out of order and die: no answer is lost, doubled or changed."""

from __future__ import annotations

import dataclasses
import random
import signal
import time

import pytest
import regenerate_data
from fake_server import MODEL, FakeServer, answer_text
from regenerate_data import FAST, answer_bytes, answered, make_prompts, prompt_row, said, user, write_prompts
from tiny import EOS, make_tiny_tokenizer

from draftsmith.data_recipes import server
from draftsmith.data_recipes.layout import TargetInfo, read_prompts
from draftsmith.data_recipes.regenerate import RegenerateSettings, regenerate
from draftsmith.data_recipes.server import base_url
from draftsmith.errors import DraftsmithError

FAULTS = ("500", "429", "503", "stall", "truncate", "cut", "close", "abort", "other")
SETTINGS = RegenerateSettings(
    max_new_tokens=32, turns=0, temperatures=[0.0, 0.7], seed=5, concurrency=8, server_timeout_s=0.3
)
INFO = TargetInfo("f" * 64, "0" * 64, 512, (2,))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids(EOS) == 2
    return tokenizer


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(server, "PATIENCE", FAST)


def conversations(count=40):
    draw = random.Random(0)
    words = ["fox", "ship", "winter", "dog", "story", "answer", "north", "sentence"]
    made = []
    for i in range(count):
        asks = [user(f"{' '.join(draw.choices(words, k=draw.randint(1, 6)))} {i}") for _ in range(1 + i % 3)]
        made.append([message for ask in asks for message in (ask, said("what the data set says"))])
    return made


@pytest.fixture
def data(tmp_path, tokenizer):
    make_prompts(tmp_path / "data", tokenizer, conversations())
    return tmp_path / "data"


def run(data, tokenizer, servers, settings=SETTINGS, **options):
    settings = dataclasses.replace(settings, servers=[s if isinstance(s, str) else s.url for s in servers])

    def no_target():
        pytest.fail("servers answer: the target need not be loaded")

    options = {"model": MODEL, "load_tokenizer": lambda: tokenizer} | options
    return regenerate(settings, data, INFO, no_target, **options)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, tokenizer):
    """Answers of one healthy server: bytes of each file, and the requests that it got."""
    data = tmp_path_factory.mktemp("healthy") / "data"
    make_prompts(data, tokenizer, conversations())
    with pytest.MonkeyPatch.context() as patch, FakeServer(tokenizer) as fake:
        patch.setattr(server, "PATIENCE", FAST)
        run(data, tokenizer, [fake])
        return answer_bytes(data), fake.bodies, answered(data)


def test_answers_are_what_the_server_said_turn_by_turn(healthy, tokenizer):
    """Against a walk over the conversations that uses the template and the fake's rule alone."""
    _, bodies, rows = healthy
    by_id = {row.id: row for row in rows}
    assert len(by_id) == len(rows)
    seeds = {str(body["prompt"]): body["seed"] for body in bodies}
    temperatures = {str(body["prompt"]): body["temperature"] for body in bodies}
    assert set(temperatures.values()) == {0.0, 0.7}
    several = 0
    for number, turns in enumerate(conversations()):
        messages, documents = [], []
        for asked in turns[::2]:
            messages.append(asked)
            prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
            text, cut = answer_text(prompt, temperatures[str(prompt)], seeds[str(prompt)])
            answer = tokenizer.encode(text, add_special_tokens=False) + [2] * (not cut)
            if documents and prompt[: len(documents[-1][0])] == documents[-1][0]:
                documents[-1] = (prompt + answer, [*documents[-1][1], [len(prompt), len(prompt) + len(answer)]], cut)
            else:
                documents.append((prompt + answer, [[len(prompt), len(prompt) + len(answer)]], cut))
            if cut:
                break
            messages.append(said(text))
        for i, (tokens, spans, cut) in enumerate(documents, 1):
            row = by_id[f"asks/{number:03d}" + (f"/{i}" if len(documents) > 1 else "")]
            assert (row.tokens, row.spans, row.finish) == (tokens, spans, "length" if cut else "eos")
            several += len(spans) > 1
    assert several > 5


def test_requests_are_exact(healthy):
    _, bodies, _ = healthy
    assert len({str(body["prompt"]) for body in bodies}) == len(bodies)
    assert all(type(token) is int for body in bodies for token in body["prompt"])
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["skip_special_tokens"]) == (MODEL, 32, False)
        assert body["return_token_ids"] is True
        # the model's generation_config.json may say otherwise
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
        assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)
        assert 0 <= body["seed"] < 2**31
    assert len({body["seed"] for body in bodies}) == len(bodies)


def test_faults_change_nothing(data, tokenizer, healthy):
    with FakeServer(tokenizer, faults=FAULTS, delay=0.03) as a, FakeServer(tokenizer, faults=FAULTS[::-1]) as b:
        stage = run(data, tokenizer, [a, b])
        met = a.met + b.met
    assert set(FAULTS) <= set(met)
    assert answer_bytes(data) == healthy[0]
    record = stage.manifest["record"]
    kinds = {
        "HTTP 500",
        "HTTP 429",
        "HTTP 503",
        "timeout",
        "damaged JSON",
        "connection",
        "finish abort",
        "no completion",
    }
    assert set(record["failures"]) == kinds
    assert record["retries"] == sum(met.values()) - met["none"]
    assert record["left_out"] == {}
    assert not list((data / "answers").glob("journal-*"))


def test_text_without_token_ids_gives_the_same(data, tokenizer, healthy):
    with FakeServer(tokenizer, token_ids=False, delay=0.02) as fake:
        run(data, tokenizer, [fake.url + "/v1/"])
    assert answer_bytes(data) == healthy[0]


@pytest.mark.parametrize(("text", "said"), [("the fox \ufffd", "the fox "), ("\ufffd", None), ("", None)])
def test_a_cut_text_ends_with_its_last_whole_character(tmp_path, tokenizer, text, said):
    """Where nothing is left of it the server is asked again: this one never says more."""
    write_prompts(tmp_path / "data", [prompt_row(0, [user("go")], [1, 5, 6])])
    fake = FakeServer(tokenizer, token_ids=False)
    completion = fake._completion
    fake._completion = lambda body: completion(body) | {"choices": [{"text": text, "finish_reason": "length"}]}
    with fake:
        if said is None:
            with pytest.raises(DraftsmithError, match=r"no server has answered.*empty answer"):
                run(tmp_path / "data", tokenizer, [fake])
        else:
            run(tmp_path / "data", tokenizer, [fake])
            (row,) = answered(tmp_path / "data")
            assert (tokenizer.decode(row.tokens[3:]), row.finish) == (said, "length")


def test_the_end_of_turn_is_the_templates(tmp_path, tokenizer):
    """A text tells no tokens: its end is what the template writes there, not the tokenizer's end of sequence."""
    other = make_tiny_tokenizer()
    other.eos_token = "<|endoftext|>"
    write_prompts(tmp_path / "data", [prompt_row(i, [user("go")], [1, 5, 6, i + 10]) for i in range(8)])
    settings = dataclasses.replace(SETTINGS, turns=1)
    with FakeServer(tokenizer, token_ids=False) as fake:
        run(tmp_path / "data", tokenizer, [fake], settings, load_tokenizer=lambda: other)
    ends = {row.tokens[-1] for row in answered(tmp_path / "data") if row.finish == "eos"}
    assert ends == {2}


def test_the_record_counts_by_temperature(data, tokenizer, healthy):
    with FakeServer(tokenizer) as fake:
        record = run(data, tokenizer, [fake]).manifest["record"]
        assert fake.most_running <= SETTINGS.concurrency
    rows = healthy[2]
    spans = [span for row in rows for span in row.spans]
    assert (record["documents"], record["answers"]) == (len(rows), len(spans))
    assert record["answer_tokens"] == sum(end - start for start, end in spans)
    groups = record["by_temperature"]
    assert set(groups) == {"0.0", "0.7"}
    for key in ("documents", "answers", "answer_tokens"):
        assert sum(group[key] for group in groups.values()) == record[key]
    cut = sum(row.finish == "length" for row in rows)
    assert record["eos_share"] == round(1 - cut / len(spans), 4)
    assert record["ended_early"]["an answer was cut"] > 0


def test_a_dead_server_beside_a_living_one(data, tokenizer, healthy):
    with FakeServer(tokenizer, always="dead") as dead, FakeServer(tokenizer) as alive:
        stage = run(data, tokenizer, [dead, alive, "http://127.0.0.1:9"])
    assert answer_bytes(data) == healthy[0]
    assert stage.manifest["record"]["failures"]["connection"] >= 2


def test_all_servers_dead_keeps_what_is_done(data, tokenizer, healthy):
    """The server dies after 25 answers: an error that names it; the next run asks only for the rest."""
    fake = FakeServer(tokenizer)
    answer = fake._answer

    def dies(handler, body):
        answer(handler, body)
        if fake.answered == 25:
            fake.always = "dead"

    fake._answer = dies
    with fake, pytest.raises(DraftsmithError, match=rf"no server has answered for .*{fake.url}/v1: connection") as said:
        run(data, tokenizer, [fake])
    assert "run again" in str(said.value)
    with FakeServer(tokenizer) as again:
        run(data, tokenizer, [again])
    assert answer_bytes(data) == healthy[0]
    assert len(again.bodies) + fake.answered == len(healthy[1])


def test_a_torn_journal_line_is_asked_again(data, tokenizer, healthy):
    fake = FakeServer(tokenizer, delay=0.05)
    answer = fake._answer
    fake._answer = lambda handler, body: answer(handler, body) if fake.answered < 9 else handler.wfile.close()
    with fake, pytest.raises(DraftsmithError, match="no server"):
        run(data, tokenizer, [fake])
    journal = data / "answers" / "journal-0.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-9])
    with FakeServer(tokenizer) as again:
        run(data, tokenizer, [again])
    assert answer_bytes(data) == healthy[0]
    journal.write_bytes(b"{broken\n" + whole)
    next((data / "answers").glob("chunk-*")).unlink()
    with pytest.raises(DraftsmithError, match=r"journal-0\.jsonl is damaged"):
        run(data, tokenizer, ["http://127.0.0.1:9"])


@pytest.mark.parametrize(("status", "said"), [("401", "DRAFTSMITH_API_KEY"), ("404", "base URL"), ("301", "base URL")])
def test_wrong_requests_stop_at_once(data, tokenizer, status, said):
    with FakeServer(tokenizer, always=status) as fake, pytest.raises(DraftsmithError, match=f"HTTP {status}.*{said}"):
        run(data, tokenizer, [fake])


def test_refused_prompts_are_counted_up_to_a_cap(data, tokenizer, healthy, capsys):
    fake = FakeServer(tokenizer)
    answer = fake._answer
    refused = {str(row.prompt) for path in sorted((data / "prompts").glob("chunk-*")) for row in read_prompts(path)[:1]}
    few = set(sorted(refused)[:2])
    fake._answer = lambda h, body: fake._fail(h, "400", body) if str(body["prompt"]) in few else answer(h, body)
    with fake:
        record = run(data, tokenizer, [fake]).manifest["record"]
    assert record["left_out"] == {"HTTP 400": 2}
    kept = {row.id for row in answered(data)}
    assert len(healthy[2]) > len(kept)
    assert "not now" in capsys.readouterr().err
    with (
        FakeServer(tokenizer, always="400") as all_refused,
        pytest.raises(DraftsmithError, match=r"refused [4-9] of \d+ conversations \(HTTP 400\)"),
    ):
        run(data, tokenizer, [all_refused], dataclasses.replace(SETTINGS, seed=6))


def test_a_prompt_that_always_fails_is_left_out(data, tokenizer):
    fake = FakeServer(tokenizer)
    answer = fake._answer
    poison = str(read_prompts(data / "prompts" / "chunk-00000.jsonl")[3].prompt)
    fake._answer = lambda h, body: fake._fail(h, "500", body) if str(body["prompt"]) == poison else answer(h, body)
    fake.delay = 0.1  # others are answered meanwhile
    settings = dataclasses.replace(SETTINGS, concurrency=2)
    with fake:
        record = run(data, tokenizer, [fake], settings).manifest["record"]
    assert record["left_out"] == {"HTTP 500, 10 times": 1}
    assert "asks/003" not in {row.id for row in answered(data)}


def test_another_model_is_said(data, tokenizer, capsys):
    with FakeServer(tokenizer, name="someone/Other-Chat") as fake:
        run(data, tokenizer, [fake])
        assert {body["model"] for body in fake.bodies} == {"someone/Other-Chat"}
    assert f"serves someone/Other-Chat, not {MODEL}" in capsys.readouterr().err


def test_a_server_that_reads_other_prompts_is_refused(data, tokenizer):
    fake = FakeServer(tokenizer)
    completion = fake._completion
    fake._completion = lambda body: completion(body) | {"usage": {"prompt_tokens": len(body["prompt"]) + 1}}
    with fake, pytest.raises(DraftsmithError, match="does not take token ids"):
        run(data, tokenizer, [fake])


def test_the_key_is_sent_and_never_shown(data, tokenizer, monkeypatch, capsys):
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "sk-very-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another")
    with FakeServer(tokenizer, faults=FAULTS) as fake:
        run(data, tokenizer, [fake])
        assert fake.keys == {"Bearer sk-very-secret"}
        fake.always = "401"
        with pytest.raises(DraftsmithError) as error:
            run(data, tokenizer, [fake], dataclasses.replace(SETTINGS, seed=6))
    found = capsys.readouterr()
    written = b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())
    assert "secret" not in found.err + found.out + str(error.value) + written.decode(errors="replace")


def test_urls():
    assert base_url("http://host:8000") == base_url("http://host:8000/v1/") == "http://host:8000/v1"
    assert base_url("https://host/models/a") == "https://host/models/a/v1"
    for wrong in ("host:8000", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(DraftsmithError, match="http://host:8000"):
            base_url(wrong)
    with pytest.raises(DraftsmithError, match="server host holds a password") as error:
        base_url("http://me:hunter2@host")
    assert "hunter2" not in str(error.value)


def test_a_time_budget_leaves_chunks(tmp_path, tokenizer):
    rows = [prompt_row(i, [user("go")], [1, 5, 6, i + 10]) for i in range(60)]
    write_prompts(tmp_path / "data", rows, chunk=4)
    settings = dataclasses.replace(SETTINGS, concurrency=2)
    with FakeServer(tokenizer, delay=0.2) as fake:
        record = run(tmp_path / "data", tokenizer, [fake], settings, minutes=1 / 60).manifest["record"]
        assert 1 <= record["chunks"] < 15
        assert record["answers"] == 4 * record["chunks"]
        fake.delay = 0
        assert run(tmp_path / "data", tokenizer, [fake], settings).manifest["record"]["answers"] == 60
    assert len(fake.bodies) == 60


def test_killed_at_random_times(tmp_path, tokenizer, healthy, forks):
    """Our process dies, two ranks one after the other, the server with faults: the same files in the end."""
    data, target = tmp_path / "data", tmp_path / "target"
    make_prompts(data, tokenizer, conversations())
    target.mkdir()
    tokenizer.save_pretrained(target)
    draw = random.Random(1)
    with FakeServer(tokenizer, faults=FAULTS, delay=0.1) as fake:
        settings = dataclasses.replace(SETTINGS, servers=[fake.url], concurrency=4)
        killed = 0
        for attempt in range(30):
            before = len(fake.bodies)
            child = forks.Process(
                target=regenerate_data.run_served, args=(settings, str(target), str(data), attempt % 2)
            )
            child.start()
            until = time.monotonic() + 20
            while len(fake.bodies) < before + draw.randint(3, 12) and child.is_alive() and time.monotonic() < until:
                time.sleep(0.005)
            if attempt < 6:
                child.kill()
            child.join(60)
            assert child.exitcode in (0, -signal.SIGKILL)
            killed += child.exitcode != 0
            if attempt >= 7 and len(answer_bytes(data)) == 5:
                break
    assert killed >= 4
    run(data, tokenizer, ["http://127.0.0.1:9"])  # nothing is left to ask
    assert answer_bytes(data) == healthy[0]
