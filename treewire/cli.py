"""This file is the command line: `up`, `demo`, `generate`, `trace`, `bench`, `record-rounds`, `simulate`, `acceptance`,
`calibrate`, `health`, `version`. Results go to standard output, the rest to standard error. Exit status 0 is success, 1 a
failure told in one line, 2 wrong usage, 130 a Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, TypeVar

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from treewire import __version__, bench_plots
from treewire import acceptance as report
from treewire.bench import PROMPTS, Plan, Row, measure, step_prices, to_json
from treewire.calibrate import recorded_choices, to_toml
from treewire.checkpoint import CONFIG, write_branch_weights
from treewire.client import AsyncClient, Client
from treewire.core.budget import StepPrice
from treewire.core.calibration import fit
from treewire.errors import TreewireError, from_rpc_error
from treewire.events import Chunk, Round
from treewire.simulation import report as simulation_report
from treewire.simulation.policies import PolicyName
from treewire.simulation.recording import SHIPPED, Recording
from treewire.simulation.simulator import MAX_STREAMS
from treewire.simulation.site import MACHINE, read_prices
from treewire.simulation.study import DEFAULT_POLICIES, DEFAULT_STREAMS, SiteChanges, Study
from treewire.stack import DEFAULT_HTTP_PORT, DEFAULT_PORT, Service, Stack, StackError, StackEvent, StackOptions, State
from treewire.trace import Failure, TimedEvent, TraceError, event_line, header_line, read_trace
from treewire.trace_view import round_tree, statistics_facts, trace_table
from treewire.types import Acceptance, Generation, Options, Request, Sampling

FAILURE_EXIT_CODE = 1
INTERRUPT_EXIT_CODE = 130
HEALTH_TIMEOUT_SECONDS = 5.0
DEMO_PROMPT = (
    "Copy this text exactly, without changes: The gateway builds the draft tree, the target checks the draft tree, "
    "and the gateway commits the accepted path."
)
DEMO_MAX_TOKENS = 64
STANDARD_INPUT = "-"
CALIBRATION_TEMPERATURES = (0.7, 1.0)

app = typer.Typer(
    name="treewire",
    help="Speculative decoding with draft trees: run it, ask it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(help="Save what every round of a generation did, and show it.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
_Result = TypeVar("_Result")

_Target = Annotated[str, typer.Option(help="Model that decides: a name, a path, or 'simulated'.")]
_Drafter = Annotated[
    str,
    typer.Option(
        help="What guesses: 'auto' (the one shipped for the target, else 'ngram'), 'ngram', 'dflash', 'none', 'simulated', "
        "or a model's name or path."
    ),
]
_Width = Annotated[int | None, typer.Option(help="Tokens at each depth that trees choose from; 1 drafts chains.")]
_Prompt = Annotated[str | None, typer.Argument(help="What to say; '-' or nothing reads standard input.")]
_MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
_Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
_TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
_TopK = Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
_MinP = Annotated[float | None, typer.Option(help="Drop tokens below this fraction of the likeliest.")]
_Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
_Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the generation; may be repeated.")]
_System = Annotated[str | None, typer.Option(help="What the model is told before the prompt.")]
_Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")]
_Deadline = Annotated[float | None, typer.Option(help="Seconds that the generation may take.")]
_Budget = Annotated[int | None, typer.Option(help="Nodes of each draft tree, root excluded; 0 turns drafting off.")]
_Threads = Annotated[int | None, typer.Option(help="CPU threads of the target.")]
_Dtype = Annotated[str, typer.Option(help="Element type of the target's weights.")]
_Logs = Annotated[Path | None, typer.Option(help="Folder of the services' logs; one is made if not given.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
_Address = Annotated[str | None, typer.Option(help="Gateway, host:port. [env: TREEWIRE_ADDRESS; else 127.0.0.1:50050]")]
_Token = Annotated[str | None, typer.Option(help="Bearer token. [env: TREEWIRE_TOKEN]")]


def _console() -> Console:
    """Standard error as it is now; what goes there is for people."""
    return Console(stderr=True, highlight=False, markup=False)


def _fail(message: str) -> NoReturn:
    """Ends the program with a failure, told in one line."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(FAILURE_EXIT_CODE)


@contextmanager
def _failures_told() -> Iterator[None]:
    """Turns what may go wrong into one line and an exit status."""
    try:
        yield
    except StackError as error:
        print("\n".join(error.log_tail), file=sys.stderr)
        _fail(str(error))
    except TreewireError as error:
        _fail(error.message)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPT_EXIT_CODE) from None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"treewire {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    _: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Speculative decoding with draft trees: run it, ask it."""


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


@app.command()
def health(
    address: _Address = None,
    service: Annotated[str, typer.Option(help="Name of a service; empty for the process.")] = Service.GATEWAY.health_name,
) -> None:
    """Ask whether a service is healthy; the exit status is 0 if it is SERVING, else 1."""
    with _failures_told(), Client(address) as client:
        status = _health_status(client.address, service)
    print(status)
    if status != "SERVING":
        raise typer.Exit(FAILURE_EXIT_CODE)


def _health_status(address: str, service: str) -> str:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


@app.command()
def generate(
    prompt: _Prompt = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    seed: _Seed = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what prompt and answer said.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0: less of what the answer said.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Above 0: the less, the more often it was said.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="TOKEN=BIAS, from -100 to 100; may be repeated.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens to generate.")] = None,
    stop: _Stop = None,
    budget: _Budget = None,
    width: _Width = None,
    accept: Annotated[Acceptance | None, typer.Option(help="Rule by which drafts are accepted.")] = None,
    log_probs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and this many of the likeliest.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the answer must match.", exists=True, dir_okay=False)
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the answer must match.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File with a grammar in GBNF that the answer must match.", exists=True, dir_okay=False)
    ] = None,
    system: _System = None,
    raw: _Raw = False,
    deadline: _Deadline = None,
    address: _Address = None,
    token: _Token = None,
    as_json: _Json = False,
) -> None:
    """Generate text with a running gateway, printed as it comes."""
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias) if logit_bias else None,
        min_tokens=min_tokens,
    )
    options = Options(sampling=sampling, max_tokens=max_tokens, stop=stop or (), budget=budget, width=width)
    options["accept"], options["num_log_probs"], options["deadline_seconds"] = accept, log_probs, deadline
    options["json_schema"], options["regex"], options["grammar"] = _text_of(json_schema), regex, _text_of(grammar)
    said = _said(prompt, system, options, raw=raw)
    with _failures_told(), Client(address, token=token) as client, client.stream(said, **options) as stream:
        for event in stream:
            if isinstance(event, Chunk) and not as_json:
                _write(event.text)
        generation = stream.final()
    _write(f"{json.dumps(_summary(generation))}\n" if as_json else "\n")


@app.command()
def calibrate(
    prompts: Annotated[Path, typer.Argument(help="File with one prompt a line.", exists=True, dir_okay=False)],
    output: Annotated[Path | None, typer.Option(help="TOML file to write, for the gateway's --config.")] = None,
    write_beside: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the drafter's checkpoint, where the draft service finds them and tells the gateway.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Above 0; may be repeated. [default: 0.7 1.0]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64,
    budget: _Budget = None,
    address: _Address = None,
    token: _Token = None,
) -> None:
    """Fit the weights by which trees aim at the noise to a running stack's drafter."""
    if output is None and write_beside is None:
        raise typer.BadParameter("--output or --write-beside is needed: where the weights go")
    temperatures = temperature or list(CALIBRATION_TEMPERATURES)
    if min(temperatures) <= 0:
        raise typer.BadParameter(f"--temperature is {min(temperatures)}, above 0 is taken: greedy trees have no noise")
    if write_beside is not None and not (write_beside / CONFIG).is_file():
        raise typer.BadParameter(f"--write-beside is {write_beside}, which has no {CONFIG}: it is no drafter's checkpoint")
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with _failures_told(), Client(address, token=token) as client:
        choices = list(recorded_choices(client, lines, temperatures, max_tokens=max_tokens, budget=budget))
        try:
            weights = fit(choices)
        except ValueError as error:
            _fail(str(error))
    text = to_toml(weights, num_choices=len(choices))
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if write_beside is not None:
        write_branch_weights(write_beside, weights)
    _write(text)


def _text_of(path: Path | None) -> str | None:
    """What a file says; None of none."""
    if path is None:
        return None
    with _opened(path, "r") as file:
        return file.read()


def _biases(pairs: list[str]) -> dict[int, float]:
    """The logit bias of TOKEN=BIAS pairs."""
    biases = {}
    for pair in pairs:
        token_id, _, bias = pair.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError as error:
            raise typer.BadParameter(f"--logit-bias is {pair!r}, it takes TOKEN=BIAS, such as 42=-100") from error
    return biases


@trace_app.command()
def record(
    file: Annotated[Path, typer.Argument(help="Where the trace goes.", dir_okay=False)],
    prompt: _Prompt = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    seed: _Seed = None,
    stop: _Stop = None,
    budget: _Budget = None,
    width: _Width = None,
    system: _System = None,
    raw: _Raw = False,
    deadline: _Deadline = None,
    address: _Address = None,
    token: _Token = None,
) -> None:
    """Generate text with a running gateway, printed as it comes, and save what every round did."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    options = Options(sampling=sampling, max_tokens=max_tokens, stop=stop or (), budget=budget, width=width)
    options["deadline_seconds"], options["include_rounds"] = deadline, True
    said = _said(prompt, system, options, raw=raw)
    with _failures_told(), _opened(file, "w") as lines, Client(address, token=token) as client:
        num_rounds = _record(client, said, options, lines)
    _write("\n")
    _console().print(f"{num_rounds} rounds are in {file}; 'treewire trace show {file}' shows them", soft_wrap=True)


@trace_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A trace, made by 'trace record' or saved by the playground.", dir_okay=False)],
    number: Annotated[int | None, typer.Option("--round", min=1, help="Only the tree of this round, from 1.")] = None,
    trees: Annotated[bool, typer.Option(help="Show the tree of each round.")] = True,
) -> None:
    """Show a trace: each round's draft tree with its accepted path, the text, and how speculation went."""
    with _opened(file, "r") as lines:
        try:
            trace = read_trace(lines)
        except TraceError as error:
            _fail(f"{file}: {error}")
    console = Console(highlight=False, markup=False)
    rounds = trace.all(Round)
    if number is not None and number > len(rounds):
        _fail(f"{file} has {len(rounds)} rounds, round {number} was asked for")
    for index, event in enumerate(rounds, start=1):
        if trees and number in (None, index):
            console.print(round_tree(event, f"round {index} of {len(rounds)}"))
    if number is None:
        console.print(trace.text, soft_wrap=True)
        console.print(trace_table(trace))


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO[str]]:
    try:
        with path.open(mode, encoding="utf-8") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"{path}: {error}")


def _record(client: Client, said: str | None, options: Options, file: IO[str]) -> int:
    """Writes a generation's trace as it comes, its failure too; the number of rounds."""
    num_rounds = 0
    started = time.perf_counter()
    request = Request(said, **options).to_message()
    file.write(f"{header_line(request, datetime.now(UTC).isoformat(timespec='seconds'))}\n")
    try:
        with client.stream(said, **options) as stream:
            for event in stream:
                file.write(f"{event_line(TimedEvent(time.perf_counter() - started, event))}\n")
                num_rounds += isinstance(event, Round)
                if isinstance(event, Chunk):
                    _write(event.text)
    except TreewireError as error:
        file.write(f"{event_line(TimedEvent(time.perf_counter() - started, Failure.of(error)))}\n")
        raise
    return num_rounds


def _said(prompt: str | None, system: str | None, options: Options, *, raw: bool) -> str | None:
    """What a user says, or None for text to continue; what else the input has goes into `options`."""
    if raw and system is not None:
        raise typer.BadParameter("--system goes with a chat, not with --raw")
    text = _prompt_text(prompt)
    if raw:
        options["text"] = text
        return None
    options["system"] = system
    return text


def _prompt_text(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or text on standard input")
    return sys.stdin.read() if argument in (None, STANDARD_INPUT) else str(argument)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(generation: Generation) -> dict[str, Any]:
    """What --json prints."""
    statistics = generation.statistics
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "rounds": statistics.rounds,
        "mean_acceptance_length": statistics.mean_acceptance_length,
        "ttft_seconds": statistics.ttft_seconds,
        "tokens_per_second": statistics.tokens_per_second,
        "stage_seconds": dict(statistics.stage_seconds),
        "lone_roots": statistics.lone_roots,
        **({"log_probs": [asdict(entry) for entry in generation.log_probs]} if generation.log_probs else {}),
    }


@app.command()
def up(
    target: _Target = StackOptions.target,
    drafter: _Drafter = StackOptions.drafter,
    budget: _Budget = None,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes any that is free.")] = DEFAULT_PORT,
    http_port: Annotated[int, typer.Option(help="Port of OpenAI's API; 0 takes any that is free.")] = DEFAULT_HTTP_PORT,
    http: Annotated[bool, typer.Option(help="Serve OpenAI's API too.")] = True,
    threads: _Threads = None,
    dtype: _Dtype = StackOptions.dtype,
    logs: _Logs = None,
    co_located: Annotated[bool, typer.Option("--co-located", help="All three in one process, without a wire between.")] = False,
) -> None:
    """Run a draft service, a verify service and a gateway on this machine until Ctrl-C."""
    options = _stack_options(
        target=target,
        drafter=drafter,
        budget=budget,
        port=port,
        http_port=http_port if http else None,
        threads=threads,
        dtype=dtype,
        logs=logs,
        co_located=co_located,
    )
    with _failures_told():
        _run(_up(options))


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to say.")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = DEMO_MAX_TOKENS,
    target: _Target = StackOptions.target,
    drafter: _Drafter = StackOptions.drafter,
    budget: _Budget = None,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes any that is free.")] = 0,
    threads: _Threads = None,
    dtype: _Dtype = StackOptions.dtype,
    logs: _Logs = None,
    as_json: _Json = False,
) -> None:
    """Run a stack on free ports, answer one prompt, show how speculation went, and stop the stack."""
    options = _stack_options(target=target, drafter=drafter, budget=budget, port=port, threads=threads, dtype=dtype, logs=logs)
    with _failures_told():
        generation = _run(_demo(options, prompt, max_tokens, on_text=(lambda text: None) if as_json else _write))
    if as_json:
        _write(f"{json.dumps(_summary(generation))}\n")
    else:
        _write("\n")
        Console().print(_acceptance_table(generation))


@app.command()
def acceptance(
    target: _Target = StackOptions.target,
    drafter: _Drafter = StackOptions.drafter,
    budgets: Annotated[str, typer.Option(help="Budgets to measure, with commas.")] = "4,8,16,32",
    temperatures: Annotated[str, typer.Option(help="Temperatures to measure, with commas.")] = "0",
    beams: Annotated[
        str | None,
        typer.Option(help="Beams to measure, with commas, of a drafter with conditional rows; 1 is without. Else its default."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, one a line, or a .jsonl file; else a few built in.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts to take.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 128,
    png: Annotated[Path | None, typer.Option(help="Draw the report into this file.")] = None,
    address: Annotated[str | None, typer.Option(help="Measure this gateway; without it stacks are started.")] = None,
    threads: _Threads = None,
    dtype: _Dtype = StackOptions.dtype,
    as_json: _Json = False,
) -> None:
    """Report the acceptance length of a drafter on a target, as trees and as chains, with the n-gram drafter beside it."""
    _check_png(png)
    options = _stack_options(target=target, drafter=drafter, port=0, threads=threads, dtype=dtype)
    try:
        each_beam = () if beams is None else _numbers(beams, int)
        report.compared(drafter, each_beam)
        if address is not None and each_beam:
            raise ValueError("beams are settings of a draft service, --address measures the one that runs")
        chosen = (report.PROMPTS if prompts is None else report.read_prompts(prompts))[:limit]
        plan = report.Plan(_numbers(budgets, int), _numbers(temperatures, float), chosen, max_tokens)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with _failures_told():
        measured = _run(_acceptance(options, plan, each_beam, address))
    if png is not None:
        report.draw(measured, png)
    if as_json:
        _write("".join(f"{json.dumps(row.to_json())}\n" for row in measured))
    else:
        for table in report.tables(measured):
            Console().print(table)


def _numbers(text: str, kind: Callable[[str], _Result]) -> tuple[_Result, ...]:
    return tuple(kind(part) for part in text.split(","))


async def _acceptance(
    options: StackOptions, plan: report.Plan, beams: tuple[int, ...], address: str | None
) -> list[report.Acceptance]:
    console = _console()

    def tell(row: report.Acceptance) -> None:
        setting = row.setting
        console.print(
            f"{setting.drafter} {setting.shape}, budget {setting.budget}, temperature {setting.temperature:g}: "
            f"{row.mean_length:.3f} tokens a round"
        )

    if address is not None:
        return await report.measure(address, plan, drafter=options.drafter, on_measured=tell)
    return await report.measure_stacks(
        options, plan, beams=beams, started=lambda each: _started(each, console), on_measured=tell
    )


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and cells: minutes on two cores.")] = False,
    target: _Target = StackOptions.target,
    drafter: _Drafter = StackOptions.drafter,
    address: Annotated[str | None, typer.Option(help="Measure this gateway; without it a stack is started.")] = None,
    threads: _Threads = None,
    dtype: _Dtype = StackOptions.dtype,
    output: Annotated[Path | None, typer.Option(help="File for the rows, as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None,
    as_json: _Json = False,
) -> None:
    """Measure plain decoding, chains, trees and the adaptive budget over concurrency, side by side in one run."""
    _check_png(png)
    plan = Plan.quick() if quick else Plan()
    with _failures_told():
        if address is not None:
            rows, prices = _run(_measured(address, plan, _console())), list[StepPrice]()
        else:
            options = _stack_options(target=target, drafter=drafter, port=0, threads=threads, dtype=dtype)
            rows, prices = _run(_benched(options, plan))
    if png is not None:
        bench_plots.draw(rows, prices, png)
    if output is not None:
        output.write_text(json.dumps(to_json(rows), indent=1) + "\n")
    if as_json:
        _write(f"{json.dumps(to_json(rows))}\n")
    else:
        Console().print(_bench_table(rows))


async def _benched(options: StackOptions, plan: Plan) -> tuple[list[Row], list[StepPrice]]:
    console = _console()
    async with _started(options, console) as stack:
        rows = await _measured(stack.address, plan, console)
        return rows, await step_prices(stack.addresses[Service.VERIFY])


async def _measured(address: str, plan: Plan, console: Console) -> list[Row]:
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), console=console) as progress:
        task = progress.add_task("measuring", total=len(plan.cells()))

        def advance(row: Row) -> None:
            description = f"{row.mode} {row.budget} at {row.concurrency}: {row.tokens_per_second:.1f} tokens/s"
            progress.update(task, advance=1, description=description)

        return await measure(address, plan, on_row=advance)


def _bench_table(rows: Sequence[Row]) -> Table:
    """Rates beside that of plain decoding at the same concurrency."""
    plain = {row.concurrency: row.tokens_per_second for row in rows if row.mode == "plain"}
    table = Table(
        "streams", "mode", "budget", "tokens/s", "to plain", "tokens a round", "TTFT", "ms a token", title="treewire bench"
    )
    for row in rows:
        table.add_row(
            str(row.concurrency),
            row.mode,
            str(row.budget),
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / plain[row.concurrency]:.2f}x",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.ttft_seconds * 1000:.0f} ms",
            f"{row.seconds_per_token * 1000:.1f}",
        )
    return table


@app.command()
def simulate(
    site: Annotated[
        str,
        typer.Option(
            help="What is simulated: 'machine' as it was recorded, or a GPU target from published figures, "
            "MODEL@COUNTxGPU:WEIGHTS, such as qwen3-8b@h200 or kimi-k2@8xb200:fp8."
        ),
    ] = MACHINE,
    recording: Annotated[Path, typer.Option(help="Recorded rounds, made by record-rounds.", show_default="the shipped one")] = (
        SHIPPED
    ),
    policies: Annotated[
        str, typer.Option(help="plain, chain:BUDGET, tree:BUDGET, adaptive:LARGEST_BUDGET, with commas.")
    ] = ",".join(DEFAULT_POLICIES),
    streams: Annotated[str, typer.Option(help=f"Streams at once, with commas; at most {MAX_STREAMS:,}.")] = (
        ",".join(map(str, DEFAULT_STREAMS))
    ),
    generations: Annotated[int, typer.Option(help="Generations that each stream runs one after the other.")] = 2,
    ramp: Annotated[float, typer.Option(help="Seconds within which the streams begin.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the times at which they begin.")] = 0,
    prices: Annotated[
        Path | None, typer.Option(help="Measured prices of the target, as verify services cache them; site machine.")
    ] = None,
    context: Annotated[int, typer.Option(help="Committed tokens of each session that a step reads; GPU sites.")] = 1024,
    network_ms: Annotated[
        float | None, typer.Option(help="One way from the gateway to each service. [default: as recorded; 0.1 for GPUs]")
    ] = None,
    link_gbit: Annotated[
        float | None, typer.Option(help="Gbit/s of each gateway's links. [default: no limit; 100 for GPUs]")
    ] = None,
    gateway_ms: Annotated[
        float | None, typer.Option(help="What the gateway does for a message. [default: as recorded; 0.2 for GPUs]")
    ] = None,
    draft_replicas: Annotated[int, typer.Option(help="Draft services.")] = 1,
    verify_replicas: Annotated[int, typer.Option(help="Verify services.")] = 1,
    gateways: Annotated[int, typer.Option(help="Gateways.")] = 1,
    max_step_tokens: Annotated[
        int | None, typer.Option(help="Positions of one step of a target. [default: 512; 8,192 for GPUs]")
    ] = None,
    max_sessions: Annotated[
        int | None, typer.Option(help="Sessions of a verify service. [default: 256; 4,096 for GPUs]")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON row a line instead of a table.")] = False,
) -> None:
    """Replay recorded rounds in virtual time: latency, throughput, what is busy, and where the bottleneck is."""
    _check_png(png)
    try:
        changes = SiteChanges(
            prices=None if prices is None else read_prices(prices),
            context_tokens=context,
            network_seconds=None if network_ms is None else network_ms / 1000,
            link_gbit=link_gbit,
            gateway_seconds=None if gateway_ms is None else gateway_ms / 1000,
            max_step_tokens=max_step_tokens,
            max_sessions=max_sessions,
            num_verify_replicas=verify_replicas,
            num_draft_replicas=draft_replicas,
            num_gateways=gateways,
        )
        recorded = Recording.load(recording)
        study = Study(
            changes.site(site, recorded),
            [PolicyName.parse(name) for name in policies.split(",")],
            _numbers(streams, int),
            generations,
            ramp,
            seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _failures_told():
        rows = _simulated(study, recorded)
    if png is not None:
        simulation_report.draw(rows, png)
    if as_json:
        _write("".join(f"{json.dumps(row.to_json())}\n" for row in rows))
    else:
        Console().print(simulation_report.table_of(rows))


def _simulated(study: Study, recorded: Recording) -> list[simulation_report.Row]:
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), console=_console(), transient=True) as progress:
        task = progress.add_task("simulating", total=len(study.streams) * len(study.policies))

        def advance(row: simulation_report.Row) -> None:
            description = f"{row.mode} {row.budget} at {row.concurrency:,}: {row.tokens_per_second:,.1f} tokens/s"
            progress.update(task, advance=1, description=description)

        return study.run(recorded, on_row=advance)


def _check_png(png: Path | None) -> None:
    if png is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("--png needs matplotlib: pip install 'treewire[report]'")


@app.command()
def record_rounds(
    file: Annotated[Path, typer.Argument(help="Where the recording goes, .npz.", dir_okay=False)],
    target: _Target = StackOptions.target,
    drafter: _Drafter = StackOptions.drafter,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, one a line, or a .jsonl file; else a few built in.")] = None,
    limit: Annotated[int, typer.Option(help="Most prompts to take.", min=1)] = 24,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.", min=3)] = 64,
    threads: _Threads = None,
    dtype: _Dtype = StackOptions.dtype,
) -> None:
    """Record a drafter's proposals and the target's choices at every position of real answers, and what rounds cost here."""
    options = _stack_options(target=target, drafter=drafter, port=0, threads=threads, dtype=dtype)
    if not options.has_drafter:
        raise typer.BadParameter(f"--drafter is {drafter!r}, without one there is nothing to record")
    try:
        chosen = (PROMPTS if prompts is None else report.read_prompts(prompts))[:limit]
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"{prompts}: {error}") from error
    if not chosen:
        raise typer.BadParameter(f"{prompts} has no prompt")
    with _failures_told():
        recorded = _run(_recorded(options, chosen, max_tokens))
    recorded.save(file)
    size = file.stat().st_size / 1024
    _console().print(f"{len(recorded.log_probs):,} positions of {len(chosen)} answers are in {file}, {size:,.0f} KiB")


async def _recorded(options: StackOptions, prompts: Sequence[str], max_tokens: int) -> Recording:
    from treewire.simulation.recorder import record_stack

    console = _console()

    def started(each: StackOptions) -> AbstractAsyncContextManager[Stack]:
        return _started(each, console)

    with Progress(SpinnerColumn(), *Progress.get_default_columns(), console=console, transient=True) as progress:
        task = progress.add_task("recording", total=len(prompts), visible=False)
        return await record_stack(
            options,
            prompts,
            max_tokens=max_tokens,
            started=started,
            on_recorded=lambda num_tokens: progress.update(task, advance=1, visible=True),
        )


def _stack_options(**options: Any) -> StackOptions:
    try:
        return StackOptions(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs to the end. SIGINT and SIGTERM cancel; a second one cancels the clean-up too, which then kills."""

    async def cancellable() -> _Result:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await coroutine

    return asyncio.run(cancellable())


async def _up(options: StackOptions) -> None:
    console = _console()
    async with _started(options, console) as stack:
        http = f", OpenAI's API at {stack.http_url}/v1" if stack.http_url else ""
        console.print(f"gateway at {stack.address}{http}, logs in {stack.logs}; Ctrl-C stops it")
        with suppress(asyncio.CancelledError):  # a signal ends the stack as asked
            await stack.wait()


async def _demo(options: StackOptions, prompt: str, max_tokens: int, *, on_text: Callable[[str], None]) -> Generation:
    async with (
        _started(options, _console()) as stack,
        AsyncClient(stack.address) as client,
        client.stream(prompt, max_tokens=max_tokens) as stream,
    ):
        async for event in stream:
            if isinstance(event, Chunk):
                on_text(event.text)
        return await stream.final()


@asynccontextmanager
async def _started(options: StackOptions, console: Console) -> AsyncIterator[Stack]:
    """A running stack; while it starts, what is waited for is shown, with seconds."""
    report = _StackReport(console)
    try:
        async with Stack(options, on_event=report) as stack:
            report.close()
            yield stack
    finally:
        report.close()


class _StackReport:
    """Shows what the services of a stack come to: a live list until closed, then a line each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(finished_text="-"), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._progress.start()
        self._tasks: dict[Service, TaskID] = {}
        self._is_closed = False

    def __call__(self, event: StackEvent) -> None:
        if self._is_closed:
            self._console.print(f"{event.service.value}: {event.state.value} {event.detail}")
        elif event.state is State.STARTING:
            self._tasks[event.service] = self._progress.add_task(f"waiting for {event.service.value}", total=1)
        else:
            description = f"{event.service.value} {event.state.value} at {event.detail}"
            self._progress.update(self._tasks[event.service], description=description, completed=1)

    def close(self) -> None:
        """Ends the live list."""
        self._is_closed = True
        self._progress.stop()


def _acceptance_table(generation: Generation) -> Table:
    """How speculation went, for people."""
    table = Table("measure", "value", title="acceptance")
    for name, value in statistics_facts(generation.statistics):
        table.add_row(name, value)
    return table
