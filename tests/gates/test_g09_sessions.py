"""G9: sessions beside each other, turns after each other, and turns that were cut short in every way there is."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import numpy as np
import pytest
from gates.harness import FAMILIES, N_SHORT, PROMPT, SEED, Said, assert_same, counters, resident, say, speaking, streamed

FIRST, SECOND = "tiny-qwen3moe", "tiny-olmoe"


def blank(llm, n_tokens=N_SHORT):
    return Said([], np.empty((n_tokens, llm.n_vocab()), np.float32))


@pytest.mark.parametrize("second", [SECOND, FIRST], ids=["other model", "same model"])
def test_two_sessions_in_turn_equal_resident(tiny, reference, second):
    with streamed(tiny(FIRST), share=1.3) as one, streamed(tiny(second), share=0.5, prefetch=2) as two:
        said = [blank(one), blank(two)]
        for tokens in zip(speaking(one, said[0]), speaking(two, said[1]), strict=True):
            for out, token in zip(said, tokens, strict=True):
                out.tokens.append(token)
            if len(said[0].tokens) == N_SHORT:
                break
        assert counters(one)["evictions"] > 0
        assert counters(two)["evictions"] > 0
    assert_same(said[0], reference(FIRST))
    assert_same(said[1], reference(second))


def test_two_sessions_in_two_threads_equal_resident(tiny, reference):
    said = {}

    def run(shape):
        with streamed(tiny(shape), share=1.3) as llm:
            said[shape] = [say(llm), say(llm)]

    threads = [threading.Thread(target=run, args=(shape,)) for shape in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for shape in (FIRST, SECOND):
        for turn in said[shape]:
            assert_same(turn, reference(shape))


@pytest.mark.parametrize("shape", FAMILIES)
def test_second_turn_equals_resident(tiny, shape):
    """The second turn goes on where the first ended: its prompt begins with all that was said."""
    texts = []
    with resident(tiny(shape)) as plain, streamed(tiny(shape), share=1.3) as llm:
        for model in (plain, llm):
            first = say(model, 20)
            second, prompt = blank(model, 20), (*PROMPT, *first.tokens, 77, 78, 79)
            for token in speaking(model, second, prompt, SEED + 1):
                second.tokens.append(token)
                if len(second.tokens) == 20:
                    break
            texts.append((first, second))
    assert_same(texts[1][0], texts[0][0])
    assert_same(texts[1][1], texts[0][1])
    assert texts[1][1].steps[0].n_tokens < 10, "what was said before was not evaluated again"
    assert texts[1][1].steps[0].hits > 0, "the expert cache is still warm"


class BrokenError(Exception):
    pass


def close_the_generator(llm):
    generator = llm.generate(PROMPT[:9], temp=1.0)
    for _ in range(5):
        next(generator)
    generator.close()


def raise_from_stopping_criteria(llm):
    def broken(tokens, _logits):
        if len(tokens) > 12:
            raise BrokenError
        return False

    for _ in llm.generate(PROMPT[:9], stopping_criteria=broken):
        pass


def raise_from_logits_processor(llm):
    def broken(tokens, scores):
        if len(tokens) > 12:
            raise BrokenError
        return scores

    for _ in llm.generate(PROMPT[:9], logits_processor=[broken]):
        pass


def interrupt_a_streaming_loop(llm):
    for i, _ in enumerate(llm.create_completion(list(PROMPT[:9]), max_tokens=40, stream=True)):
        if i == 3:
            raise KeyboardInterrupt


def interrupt_between_evaluations(llm):
    """Ctrl-C as Python sees it when it comes during an evaluation that is too short to be stopped: raised right after it."""
    session, decode = llm.session, llm.session._evaluate

    def interrupted(*args):
        decode(*args)
        raise KeyboardInterrupt

    session._evaluate = interrupted
    try:
        llm.eval(PROMPT[:5])
    finally:
        session._evaluate = decode


CUTS = {
    close_the_generator: None,
    raise_from_stopping_criteria: BrokenError,
    raise_from_logits_processor: BrokenError,
    interrupt_a_streaming_loop: KeyboardInterrupt,
    interrupt_between_evaluations: KeyboardInterrupt,
}


@pytest.mark.parametrize("shape", FAMILIES)
def test_turn_after_a_cancelled_one_equals_resident(tiny, reference, shape):
    """In one session, so that a cancelled turn also follows others that were."""
    with streamed(tiny(shape), share=1.3, prefetch=1, record_routes=True) as llm:
        say(llm, 10)
        for cut, error in CUTS.items():
            before = lookups(llm)
            with pytest.raises(error) if error else contextlib.nullcontext():
                cut(llm)
            assert lookups(llm) > before, f"{cut.__name__}: the cancelled turn had begun"
            routes = []
            llm.session.on_routes = routes.append
            assert_same(say(llm), reference(shape))
            llm.session.on_routes = None
            steps = np.concatenate([columns["step"] for columns in routes])
            assert steps[0] == 0
            assert (steps == 0).sum() == (steps == 1).sum(), f"{cut.__name__}: something of the cancelled turn is in the next one's trace"


def lookups(llm):
    return counters(llm)["misses"] + counters(llm)["hits"]


def test_ctrl_c_stops_a_long_evaluation_in_the_middle(tiny, reference):
    """A prompt of thousands of tokens in one batch: the signal is noticed between two layers, long before its end."""
    long = np.random.default_rng(1).integers(10, 500, 3000).tolist()
    llama = {"n_ctx": 4096, "n_batch": 4096, "n_ubatch": 32}

    def on_alarm(*_):
        raise KeyboardInterrupt

    # CPU time of this process: how busy others keep the machine does not count.

    with streamed(tiny(FIRST), share=1.3, record_routes=True, llama=llama) as llm:
        began = time.process_time()
        llm.eval(long)
        whole_seconds = time.process_time() - began
        llm.reset()
        before = signal.signal(signal.SIGPROF, on_alarm)
        signal.setitimer(signal.ITIMER_PROF, 0.1)
        try:
            began = time.process_time()
            with pytest.raises(KeyboardInterrupt):
                llm.eval(long)
            stopped_seconds = time.process_time() - began
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        assert stopped_seconds < whole_seconds / 2
        assert llm.n_tokens == 0
        said = say(llm, 16)
    with resident(tiny(FIRST), **llama) as plain:
        assert_same(said, say(plain, 16))
