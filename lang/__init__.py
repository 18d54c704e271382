"""Programs: `gen`, `select`, `fork` and `join` in plain Python, run as a graph the engine can see.

Programs written for SGLang's frontend run by changing the import:

    import phloem.lang as pl

    @pl.function
    def answer(s, question):
        s += pl.user(question)
        s += pl.assistant(pl.gen("answer", max_tokens=32))

    pl.set_default_backend(pl.Engine("smollm2-135m"))
    print(answer.run("What is phloem?")["answer"])
"""

from .api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    greedy_token_selection,
    image,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
    user_begin,
    user_end,
    video,
)
from .backends.http import HttpBackend as RuntimeEndpoint
from .backends.local import OwnEngine as Engine
from .backends.openai import OpenAIBackend as OpenAI
from .backends.runtime import Runtime
from .program import Program
from .state import ProgramState, ProgramStateGroup, State, StateGroup
from .symbol import TraceError

__all__ = [
    "Engine",
    "OpenAI",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "StateGroup",
    "TraceError",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
