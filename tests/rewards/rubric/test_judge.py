"""A judge against an endpoint on loopback that fails in every way: no stall, no leak."""

import json
import logging
import re
import threading
import time
from collections import Counter

import numpy as np
import pytest

from jaxrl_llm.rewards import WeightedReward, grade
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rewards.rubric import CAUSES, Judge, Judgements, judge_terms
from jaxrl_llm.rewards.rubric.endpoint import JudgeRequest, _wait_s
from tests.rewards.processes import becomes_true
from tests.rewards.rubric.fake import CRITERIA, Reply, completion, rubric, scores, serving, written

KEY = "sk-Secret-0123456789"
EXAMPLE = {"question": "2+2?", "answer": "4"}
FAULTS = (
  Reply(status=429, headers={"Retry-After": "0.02"}), Reply(status=500, body=b"oops"), Reply(fault="hang"), Reply("It is fine."),
  Reply(fault="half"), Reply(fault="close"),
)  # fmt: skip


def judged(judge, texts, examples=None):
  return judge.begin([completion(text) for text in texts], examples or [EXAMPLE] * len(texts))()


def asked_about(body):
  return body["messages"][1]["content"].partition("<response ")[2].split("\n")[1]


def values(outcomes):
  return [outcome.value for outcome in outcomes]


@pytest.fixture
def judge_of():
  """Makes judges, and closes them after the test."""
  judges = []

  def make(url, *, judgements=None, **fields):
    judges.append(Judge(rubric(url, **fields)))
    if judgements is not None:
      judges[-1].open(judgements)
    return judges[-1]

  yield make
  for judge in judges:
    judge.close()


def test_of_a_thousand_questions_with_a_tenth_of_faults_all_are_answered(judge_of):
  asked = Counter()

  def reply(number, body):
    text = asked_about(body)
    asked[text] += 1
    index = int(text.removeprefix("r"))
    if index % 10 == 3 and asked[text] == 1:
      return FAULTS[index // 10 % len(FAULTS)]
    return scores("yes" if index % 2 else "no", index % 5 + 1)

  with serving(reply) as endpoint:
    judge = judge_of(endpoint.url, timeout_s=2.0, deadline_s=60.0, concurrency=32)
    outcomes = judged(judge, [f"r{i}" for i in range(1000)])
    assert [(x.value, x.cause) for x in outcomes] == [((3 * (i % 2) + i % 5 / 4) / 4, None) for i in range(1000)]
    metrics = judge.metrics()
    assert metrics["judge/test/calls"] == 1000 + metrics["judge/test/retries"] == len(endpoint.bodies) and len(endpoint.bodies) >= 1100
    assert metrics["judge/test/cache_hits"] == 0 and metrics["judge/test/seconds"] < 60


def test_a_judge_that_never_answers_costs_its_deadline_and_no_more(judge_of):
  for fault in ("hang", "trickle", "trickle_headers"):
    with serving(lambda number, body, fault=fault: Reply(scores(), fault=fault)) as endpoint:
      judge = judge_of(endpoint.url, timeout_s=0.2, deadline_s=0.5, concurrency=4)
      begun = time.monotonic()
      outcomes = judged(judge, [f"r{i}" for i in range(20)])
      assert time.monotonic() - begun < 10, fault
      assert {(x.value, x.cause) for x in outcomes} == {(None, "judge_timeout")}
      assert judge.metrics()["judge/test/failed/judge_timeout"] == 20
      assert becomes_true(lambda judge=judge: "0 requests under way, 0 to be sent" in judge.waits_for(), 10)


@pytest.mark.parametrize(
  ("reply", "cause", "num_calls", "detail"),
  [
    (Reply(status=400, body=b'{"error": "too many tokens"}'), "judge_refused", 1, "HTTP 400: .*too many tokens"),
    (Reply(status=401, body=f"bad key {KEY[:9]}***".encode()), "judge_refused", 1, "HTTP 401 .it refuses the API key.$"),
    (Reply(status=404), "judge_refused", 1, "HTTP 404.*are the URL and the model right"),
    (Reply(status=307, headers={"Location": "http://elsewhere/"}), "judge_refused", 1, "HTTP 307, .*not followed"),
    (Reply(status=422, body=f"you sent {KEY}".encode()), "judge_refused", 1, r"you sent \*\*\*$"),
    (Reply(status=429), "judge_busy", 4, "HTTP 429"),
    (Reply(status=503), "judge_busy", 4, "HTTP 503"),
    (Reply(fault="close"), "judge_unreachable", 4, r"\(4 requests\)"),
    (Reply(scores(), fault="half"), "judge_unreachable", 4, "IncompleteRead"),
    (Reply("It is fine."), "judge_malformed", 3, "not one JSON object"),
    (Reply(scores("yes", 6)), "judge_malformed", 3, "the score of clear is 6, expected a number from 1 to 5"),
    (Reply(body=b"<html>"), "judge_malformed", 3, "no chat completion"),
    (Reply(body=b'{"choices": []}'), "judge_malformed", 3, "no chat completion"),
    (Reply(body=b'{"choices": [{"message": {"content": null}}]}'), "judge_malformed", 3, "an empty text"),
    (Reply(body=b'{"choices": [{"message": {"content": "{"}, "finish_reason": "length"}]}'), "judge_malformed", 3, "max_tokens"),
  ],
)
def test_failures_are_retried_by_their_class(judge_of, monkeypatch, reply, cause, num_calls, detail):
  monkeypatch.setenv("JUDGE_KEY", KEY)
  with serving(lambda number, body: reply) as endpoint:
    judge = judge_of(endpoint.url, api_key_env="JUDGE_KEY")
    (outcome,) = judged(judge, ["r"])
    assert (outcome.value, outcome.cause, len(endpoint.bodies)) == (None, cause, num_calls) and cause in CAUSES
    assert re.search(detail, outcome.detail) and "Secret" not in outcome.detail and "\n" not in outcome.detail
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}" and endpoint.paths[0] == "/v1/chat/completions"
    # A failure is not kept: the same response is asked about again.
    endpoint.reply = lambda number, body: scores()
    assert values(judged(judge, ["r"])) == [1.0]


def test_a_wait_that_the_endpoint_asks_for_is_kept_and_bounded(judge_of):
  assert (_wait_s("1.5"), _wait_s("9999"), _wait_s("-1"), _wait_s(None), _wait_s("soon"), _wait_s("nan")) == (1.5, 60, 0, 0, 0, 0)
  assert _wait_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0 and _wait_s("Wed, 21 Oct 2150 07:28:00 GMT") == 60
  times = []

  def reply(number, body):
    times.append(time.monotonic())
    return scores() if number else Reply(status=429, headers={"Retry-After": "0.3"})

  with serving(reply) as endpoint:
    assert values(judged(judge_of(endpoint.url), ["r"])) == [1.0]
    assert times[1] - times[0] >= 0.3
    # A wait beyond the deadline is not begun.
    endpoint.reply = lambda number, body: Reply(status=429, headers={"Retry-After": "50"})
    begun = time.monotonic()
    assert judged(judge_of(endpoint.url), ["s"])[0].cause == "judge_busy" and time.monotonic() - begun < 5


def test_at_most_so_many_requests_are_under_way(judge_of):
  with serving(lambda number, body: Reply(scores(), delay_s=0.1)) as endpoint:
    judge = judge_of(endpoint.url, concurrency=3)
    assert values(judged(judge, [f"r{i}" for i in range(15)])) == [1.0] * 15
    assert 1 < endpoint.most_at_once <= 3


def test_equal_responses_to_equal_problems_are_judged_once(judge_of):
  with serving(lambda number, body: Reply(scores("yes", 1 + number % 5), delay_s=0.02)) as endpoint:
    judge = judge_of(endpoint.url)
    first = values(judged(judge, ["a", "b", "a", "a"]))
    assert len(endpoint.bodies) == 2 and first[0] == first[2] == first[3]
    assert judge.metrics()["judge/test/cache_hits"] == 2
    assert values(judged(judge, ["a", "b"])) == first[:2] and len(endpoint.bodies) == 2
    assert judge.metrics()["judge/test/cache_hits"] == 2
    judged(judge, ["a"], [EXAMPLE | {"question": "3+1?"}])
    assert len(endpoint.bodies) == 3


def test_a_response_that_is_too_long_is_not_sent(judge_of):
  with serving() as endpoint:
    judge = judge_of(endpoint.url, max_chars=3)
    outcomes = judged(judge, ["abc", "abcd"])
    assert [x.cause for x in outcomes] == [None, "too_long"] and len(endpoint.bodies) == 1


def test_questions_begin_before_other_terms_are_called_and_join_those_under_way(judge_of):
  """While a slow reward function runs, the judge answers, and no question is asked twice."""
  answered = threading.Event()

  def reply(number, body):
    answered.set()
    return scores()

  with serving(reply) as endpoint:
    judge = judge_of(endpoint.url)
    waits = WeightedReward("waits", lambda completion, example: float(answered.wait(5)))
    terms = [waits, WeightedReward("judge", None, 0.5, service=judge)]
    assert grade(terms, [completion("r")], [EXAMPLE]).totals.tolist() == [1.5]
    judge.begin([completion("s")], [EXAMPLE])  # As a stream does, without waiting.
    assert grade(terms, [completion("s")], [EXAMPLE]).totals.tolist() == [1.5] and len(endpoint.bodies) == 2


def test_a_criterion_is_a_term_that_is_only_logged(tmp_path):
  reply = lambda number, body: "no" if asked_about(body) == "bad" else scores("yes", 3)
  with serving(reply) as endpoint:
    terms = judge_terms(written(tmp_path / "help.json", endpoint.url), weight=0.5)
    assert [(x.name, x.weight, x.monitors) for x in terms] == [
      ("judge/help", 0.5, False), ("judge/help/correct", 0.0, True), ("judge/help/clear", 0.0, True),
    ]  # fmt: skip
    with Grader([*terms]) as call:
      graded = grade(terms, [completion("good"), completion("bad")], [EXAMPLE] * 2, call=call)
  assert graded.failed.tolist() == [None, "judge_malformed"] and graded.totals.tolist() == [0.5 * (3 + 0.5) / 4, 0]
  assert graded.parts["judge/help/correct"][0] == 1 and graded.parts["judge/help/clear"][0] == 0.5
  assert np.isnan(graded.parts["judge/help/clear"][1]) and np.isnan(graded.parts["judge/help/correct"][1])


def test_a_judge_of_weight_0_changes_nothing_even_when_it_fails(tmp_path):
  right = WeightedReward("right", lambda completion, example: float(completion.text == "4"))
  alone = grade([right], [completion("4"), completion("5")], [EXAMPLE] * 2)
  with serving(lambda number, body: Reply(status=400)) as endpoint:
    terms = [right, *judge_terms(written(tmp_path / "help.json", endpoint.url), weight=0.0)]
    graded = grade(terms, [completion("4"), completion("5")], [EXAMPLE] * 2)
    assert len(endpoint.bodies) == 2
  for name in ("totals", "verdicts", "failed", "details"):
    assert getattr(graded, name).tolist() == getattr(alone, name).tolist()


@pytest.mark.parametrize(
  ("reply", "line"),
  [
    (Reply(status=401), "judge_refused: .*HTTP 401 .it refuses the API key."),
    (Reply(status=404), "judge_refused: .*HTTP 404.*are the URL and the model right"),
    (Reply("Fine."), "judge_malformed: the answer is not one JSON object"),
    (None, "judge_unreachable: http://127.0.0.1:.*ConnectionRefused"),
  ],
)
def test_a_judge_that_does_not_work_is_one_line_before_the_run(tmp_path, monkeypatch, reply, line):
  monkeypatch.setenv("JUDGE_KEY", KEY)
  with serving(lambda number, body: reply) as endpoint:
    url = endpoint.url if reply is not None else "http://127.0.0.1:9/v1"
    path = written(tmp_path / "help.json", url, api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match=line) as caught:
      Grader(judge_terms(path))
  message = str(caught.value)
  assert message.startswith(f"judge {path}: found no judgement of a first question (judge_") and "\n" not in message and KEY not in message


def test_a_run_that_goes_on_gets_the_same_bits(judge_of, tmp_path):
  """The endpoint never gives the same scores again, so only kept judgements can be equal."""
  draws = iter(range(10_000))
  with serving(lambda number, body: scores("yes", 1 + next(draws) * 1e-3)) as endpoint:
    first = judge_of(endpoint.url, judgements=Judgements(tmp_path))
    texts = [f"r{i}" for i in range(50)]
    before = values(judged(first, texts))
    assert len(set(before)) == 50
    # Nothing is closed, as after a kill, which left half a line of a judgement that was never used.
    with open(tmp_path / "process-0.jsonl", "ab") as file:
      file.write(b'{"key": "abc", "scores": [1.0, 2')
    resumed = judge_of(endpoint.url, judgements=Judgements(tmp_path))
    num_calls = len(endpoint.bodies)
    after = values(judged(resumed, [*texts, "new"]))
    assert after[:50] == before and len(endpoint.bodies) == num_calls + 1
    assert resumed.metrics()["judge/test/cache_hits"] == 50
    again = judge_of(endpoint.url, judgements=Judgements(tmp_path))
    assert values(judged(again, [*texts, "new"])) == after  # The line after the torn one counts.
    # Other weights judge anew without asking; another model asks.
    heavier = tuple(x._replace(weight=x.weight * (1 + 9 * (x.name == "clear"))) for x in CRITERIA)
    num_calls = len(endpoint.bodies)
    judged(judge_of(endpoint.url, judgements=Judgements(tmp_path), criteria=heavier), texts)
    assert len(endpoint.bodies) == num_calls + 1  # The first question of `open`.
    assert values(judged(judge_of(endpoint.url, judgements=Judgements(tmp_path), model="other"), texts)) != before


def test_a_judgement_after_its_deadline_is_not_kept(judge_of, monkeypatch):
  answered, send = threading.Event(), JudgeRequest.send

  def late(request):
    answer = send(request)
    answered.set()
    return answer

  monkeypatch.setattr(JudgeRequest, "cut", lambda request: None)
  monkeypatch.setattr(JudgeRequest, "send", late)
  with serving(lambda number, body: Reply(scores(), delay_s=0.6)) as endpoint:
    judge = judge_of(endpoint.url, deadline_s=0.3)
    assert judged(judge, ["late"])[0].cause == "judge_timeout" and not answered.is_set()
    assert answered.wait(10)
    judge.close()
    for thread in threading.enumerate():
      if thread.name.startswith("judge test"):
        thread.join(10)
    assert judge._scores(judge._key_of("2+2?", "4", "late")) is None


def test_the_key_is_in_no_file_log_or_message(tmp_path, monkeypatch, caplog, capfd):
  monkeypatch.setenv("JUDGE_KEY", KEY)
  echo = Reply(status=500, body=KEY.encode(), headers={"X-Key": KEY})
  reply = lambda number, body: scores() if number in (0, 2) else echo
  with serving(reply) as endpoint, caplog.at_level(logging.DEBUG):
    terms = judge_terms(written(tmp_path / "help.json", endpoint.url, api_key_env="JUDGE_KEY", tries=1))
    with Grader(terms, judgements=tmp_path / "kept") as call:
      graded = grade(terms, [completion("a"), completion("b")], [EXAMPLE] * 2, call=call)
      shown = [repr(terms), str(graded), call.waits_for(), json.dumps(call.metrics()), caplog.text, "".join(capfd.readouterr())]
  assert sorted(graded.failed.tolist(), key=str) == [None, "judge_busy"]
  files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
  assert len(files) == 2 and not [text for text in files + shown if KEY in text]


def test_closing_ends_all_threads():
  with serving(lambda number, body: Reply(fault="hang")) as endpoint:
    before = set(threading.enumerate())
    judge = Judge(rubric(endpoint.url, concurrency=3))
    judge.begin([completion(f"r{i}") for i in range(9)], [EXAMPLE] * 9)
    own = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("judge")]
    assert len(own) == 4 and all(thread.daemon for thread in own)
    judge.close()
    for thread in own:
      thread.join(5)
    assert not any(thread.is_alive() for thread in own)
