"""The page to chat on, in a real browser."""

import json
import re

import pytest

from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.serve.chat_page import build_chat_page
from tests.runs import wait_for
from tests.serve.browser import HAS_CHROMIUM, browsing
from tests.serve.fake_engine import FakeEngine, serving

in_a_browser = pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium")
HOSTILE = "<img src=x onerror=alert(1)>\n</script>\u202eé"


def send(page, text):
  page.type("#message", text)
  page.press_enter()


def test_the_page_is_one_file_and_allows_no_other_script():
  page = build_chat_page()
  assert "{{" not in page and not re.search(r"(?:src|href)=\"(?!data:)", page)
  assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://| on\w+=", page)
  assert page.count("sha256-") == 2 and "default-src 'none'" in page and "unsafe" not in page


@in_a_browser
def test_a_conversation(tmp_path):
  engine = FakeEngine(HOSTILE, delay=0.005, limits=EngineLimits(context=1024, requests=4))
  with serving(engine) as service, browsing(service.url, tmp_path) as page:
    page.wait("document.querySelector('#status').textContent === 'ready'")
    assert page.run("document.querySelector('#model').textContent") == "toy"
    page.type("#system", "be brief")
    send(page, HOSTILE)
    page.wait("document.querySelector('.end')?.textContent.includes('ended by itself')")
    assert bytes(engine.requests[0].tokens).decode() == f"<system>be brief<user>{HOSTILE}<assistant>"
    shown = HOSTILE.replace("\u202e", "\\u{202e}")
    assert page.run("document.querySelector('.turn.user').textContent") == shown
    spans = page.run("[...document.querySelectorAll('.tokens span')].map((x) => x.textContent)")
    # Bytes of a character that is not whole yet, and the token that ends the answer.
    assert len(spans) == len(HOSTILE.encode()) + 1 and "".join(spans).replace("◌", "") == shown + "<258>"
    assert page.run("document.querySelectorAll('#talk img, #talk script').length") == 0
    page.point(".tokens span:nth-child(3)")
    note = page.run("document.querySelector('#readout').textContent")
    assert note == "token 3, “m”, id 109, log-probability -0.3750 (p = 0.687)"
    assert page.run("document.querySelector('.tokens span:nth-child(3)').style.background").startswith("rgba(")
    send(page, "again")
    page.wait("document.querySelectorAll('.end').length === 2 && document.querySelectorAll('.end')[1].textContent")
    assert bytes(engine.requests[1].tokens).decode() == f"<system>be brief<user>{HOSTILE}<assistant>{HOSTILE}<user>again<assistant>"
    page.run("document.querySelector('#seed').value = '5'")
    page.point("#again", click=True)
    wait_for(lambda: len(engine.requests) == 3)
    assert (engine.requests[2].tokens, engine.requests[2].seed) == (engine.requests[1].tokens, 5)
    assert {url.rpartition("/")[0] for url in page.requests if not url.startswith("data:")} <= {
      service.url, f"{service.url}/v1", f"{service.url}/v1/chat",
    }  # fmt: skip
    assert page.problems == []


@in_a_browser
def test_stop_ends_the_request(tmp_path):
  engine = FakeEngine("x" * 200, delay=0.02)
  with serving(engine) as service, browsing(service.url, tmp_path) as page:
    page.run("document.querySelector('#max_tokens').value = '200'")
    send(page, "hi")
    page.wait("document.querySelectorAll('.tokens span').length > 3")
    page.point("#stop", click=True)
    wait_for(lambda: engine.aborts == 1 and not engine.open)
    page.wait("document.querySelector('.end').textContent.includes('stopped')")
    engine.fail(RuntimeError("lost"))
    send(page, "hi")
    page.wait("document.querySelector('.end.bad')?.textContent.includes('the engine cannot decode')")


@in_a_browser
def test_a_key_and_a_checkpoint_without_template(tmp_path):
  engine = FakeEngine("hello")
  with serving(engine, tokenizer=ByteTokenizer(), api_key="s3cret") as service, browsing(service.url, tmp_path) as page:
    page.wait("document.querySelector('#status').textContent.includes('no API key')")
    page.type("#key", "s3cret")
    page.run("document.querySelector('#key').blur()")
    page.wait("document.querySelector('#status').textContent === 'ready'")
    send(page, "12 + 3")
    page.wait("document.querySelector('.end')?.textContent.startsWith('6 tokens')")
    assert engine.requests[0].tokens == ByteTokenizer().encode_prompt("12 + 3")
    # No key is kept where another page could find it.
    assert json.loads(page.run("JSON.stringify([localStorage.length, sessionStorage.length, document.cookie])")) == [0, 0, ""]
