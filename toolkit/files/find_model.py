"""Finding a model's config.json: a known model, a folder, a file, the hub's cache, or the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.catalogue.families import FAMILIES
from toolkit.catalogue.general import INDEX
from toolkit.catalogue.known import KNOWN, known_model
from toolkit.catalogue.layers import text_config
from toolkit.catalogue.quantization import Config
from toolkit.errors import InputError, nearest
from toolkit.files.strict import parse_json, read_bytes

HUB_ID = r"[\w.-]+/[\w.-]+"
MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 64 << 20  # it names each tensor
HUB_S = 5.0  # the hub answers within this, or there is no network


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's config and its origin.

    Attributes:
        name: for the recipe's name.
        source: for `model.source`: a hub id or a folder.
        revision: a commit of the hub; '': not known, or a folder.
        config: the content of config.json.
        origin: where the config was read, for readers.
        weights: whether weights are there or come from the hub; otherwise random ones are loaded.
        gated: whether the hub asks to accept a licence first.
        stored_bytes: of all weights, by the index of a checkpoint of an unknown family; 0: there is
            none.
    """

    name: str
    source: str
    revision: str
    config: Config
    origin: str
    weights: bool = True
    gated: bool = False
    stored_bytes: int = 0


def find_model(model: str) -> FoundModel:
    """The config of a model: a folder, a config.json, a known name, or a hub id.

    A hub id is looked up among the known models and in the hub's cache here, then on the hub.
    Raises `InputError` where nothing is found, with the nearest known name.
    """
    path = Path(model)
    if path.is_dir():
        return _in_folder(path, path / "config.json")
    if path.is_file():
        return _in_folder(path.absolute().parent, path)
    if known := known_model(model):
        origin = f"its sizes ship with llmctl, read in {known.source}"
        return FoundModel(
            known.name, known.hub, known.revision, known.config, origin, gated=known.gated
        )
    if model.startswith(("/", ".")) or model.endswith(".json"):
        raise InputError(f"{model}: no such file or folder", "give a model's config.json")
    if not re.fullmatch(HUB_ID, model):
        hint = nearest(model.lower(), KNOWN)
        if not hint.startswith("did you mean"):
            hint = "llmctl recipe models lists those known."
        hint = f"{hint} Other models: a hub id such as org/name, a folder, or a config.json"
        raise InputError(f"there is no known model '{model}'", hint)
    return _from_hub(model)


def _in_folder(folder: Path, file: Path) -> FoundModel:
    if not file.is_file():
        raise InputError(f"{folder}: no config.json in it", "give the folder of a model")
    source = str(folder)
    if not source.startswith(("/", ".")):
        source = f"./{source}"
    weights = any(folder.glob("*.safetensors"))
    name = folder.absolute().name
    config = _read(file)
    stored = 0 if _is_known(config) else _stored_bytes(folder / INDEX)
    origin = f"its sizes are from {file}"
    return FoundModel(name, source, "", config, origin, weights, stored_bytes=stored)


def _is_known(config: Config) -> bool:
    return text_config(config).get("model_type") in FAMILIES


def _stored_bytes(file: Path) -> int:
    """The bytes of all weights, by the index of a checkpoint; 0: it is not there, or tells none."""
    if not file.is_file():
        return 0
    index = parse_json(read_bytes(file, most_bytes=MAX_INDEX_BYTES), file)
    about = index.get("metadata") if isinstance(index, dict) else None
    size = about.get("total_size") if isinstance(about, dict) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0


def _from_hub(model: str) -> FoundModel:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    no_network = InputError(
        f"{model}: not a known model, not in the hub's cache here, and the hub does not answer",
        "give the path of its config.json, or a model of: llmctl recipe models",
    )
    name = model.partition("/")[2]
    cached = try_to_load_from_cache(model, "config.json")
    origin = "its config.json is from the hub's cache on this machine"
    if not isinstance(cached, str):
        origin = "its config.json is from the hub"
        if not _hub_answers():
            raise no_network
        try:
            cached = hf_hub_download(model, "config.json", etag_timeout=HUB_S)
        except GatedRepoError:
            hint = "accept its licence there and log in (hf auth login), or give its config.json"
            raise InputError(f"{model}: the hub asks for a licence first", hint) from None
        except RepositoryNotFoundError:
            hint = "check the name; a private model needs a login (hf auth login)"
            raise InputError(f"{model}: not on the hub", hint) from None
        except (OSError, ValueError):  # the network went, in the words of several libraries
            raise no_network from None
    file = Path(cached)
    commit = file.parent.name  # the cache has a folder per commit
    revision = commit if re.fullmatch(r"[0-9a-f]{40}", commit) else ""
    config = _read(file)
    stored = 0 if _is_known(config) else _stored_bytes(_index_from_hub(model, file))
    return FoundModel(name, model, revision, config, origin, stored_bytes=stored)


def _index_from_hub(model: str, config: Path) -> Path:
    """The index of a checkpoint in the hub's cache, beside its config; else from the hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    beside = config.with_name(INDEX)
    if beside.is_file() or not _hub_answers():
        return beside
    try:
        return Path(hf_hub_download(model, INDEX, etag_timeout=HUB_S))
    except (HfHubHTTPError, OSError, ValueError):  # a checkpoint of one file has none
        return beside


def _hub_answers() -> bool:
    """Whether the hub answers at once; its own client tries again and again for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_S)
    except Exception:  # noqa: BLE001  (whatever its HTTP client raises, there is no answer)
        return False
    return True


def _read(file: Path) -> Config:
    """The content of a config.json, with the quantization that ModelOpt writes beside it."""
    data = _parsed(file)
    if not isinstance(data, dict):
        raise InputError(f"{file.name}: not a model's config.json", "it is a JSON object")
    if "model" in data and "hardware" in data:
        raise InputError(f"{file.name}: a recipe already", f"check it with: llmctl doctor {file}")
    if not {"model_type", "architectures", "text_config"} & data.keys():
        hint = "it has a model_type; a recipe is checked with: llmctl doctor FILE"
        raise InputError(f"{file.name}: not a model's config.json", hint)
    beside = file.with_name("hf_quant_config.json")
    if "quantization_config" not in data and beside.is_file():
        beside_it = _parsed(beside)
        given = beside_it.get("quantization") if isinstance(beside_it, dict) else None
        if isinstance(given, dict):
            if given.get("quant_algo") == "NVFP4" and "exclude_modules" not in given:
                problem = f"{beside.name}: no exclude_modules, which vLLM needs for NVFP4"
                raise InputError(problem, "give the whole file: it says what keeps 16 bits")
            data["quantization_config"] = {"quant_method": "modelopt", **given}
    return data


def _parsed(file: Path) -> object:
    """The JSON in a file that came with a model. `InputError` for what is larger than any."""
    return parse_json(read_bytes(file, most_bytes=MAX_CONFIG_BYTES), file)
