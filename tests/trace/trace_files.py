"""Write small XSpace files, event by event."""

from jax.profiler import ProfileData

from meshkit.hlo.schedule import Collective
from meshkit.trace.operations import TracedProgram, TraceFile
from meshkit.verbs.profile.profiler import TracedJob, measure_traces


def collective(name, kind, axis, *, group_size=2, payload_bytes=1024):
    return Collective(
        name=name,
        key=f"{kind}|{axis}",
        collective=kind,
        axes=(axis,),
        axes_complete=True,
        link="nvlink",
        fabric=None,
        dtype="bf16",
        group_size=group_size,
        num_groups=1,
        gpus_per_domain=group_size,
        payload_bytes=payload_bytes,
    )


def plane_text(plane, events, line=None):
    """Return one plane as a text proto.


    Args:
        events: (name, start_us, end_us, stats) of each.
        line: the name of the line, or of several lines by event name.
    """
    keys = sorted({k for *_, stats in events for k in stats})
    names = list(dict.fromkeys(name for name, *_ in events))
    line = line or ("Stream #7(Kernel)" if "GPU" in plane else "thread")
    line_of = line if isinstance(line, dict) else dict.fromkeys(names, line)
    lines = {}
    for name, start, end, stats in events:
        values = "".join(
            f"stats{{metadata_id:{keys.index(k) + 1} "
            + (f'str_value:"{v}"' if isinstance(v, str) else f"int64_value:{v}")
            + "}"
            for k, v in stats.items()
        )
        offset, duration = round(start * 1e6), round((end - start) * 1e6)
        text = lines.setdefault(line_of[name], [])
        text.append(f"events{{metadata_id:{names.index(name) + 1} offset_ps:{offset} duration_ps:{duration} {values}}}")
    written = "".join(f'lines{{id:{i} name:"{n}" {"".join(t)}}}' for i, (n, t) in enumerate(lines.items(), 1))
    meta = "".join(f'event_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in enumerate(names, 1))
    meta += "".join(f'stat_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in enumerate(keys, 1))
    return f'planes{{id:1 name:"{plane}" {written} {meta}}}'


def clock_text(start_ns, seconds=1.0):
    """Return the plane that says when the profile ran."""
    stats = (("profile_start_time", start_ns), ("profile_stop_time", start_ns + round(seconds * 1e9)))
    text = "".join(f"stats{{metadata_id:{i} uint64_value:{v}}}" for i, (_, v) in enumerate(stats, 1))
    text += "".join(f'stat_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, (n, _) in enumerate(stats, 1))
    return f'planes{{id:9 name:"Task Environment" {text}}}'


def write_planes(path, *texts):
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("".join(texts)))
    return path


def write_trace(path, plane, events):
    """Write an XSpace with one plane of device 0."""
    return TraceFile(write_planes(path, plane_text(plane, events)), {0: 0})


def program(*collectives, **known):
    """Return what is known of the program that the operations belong to."""
    return TracedProgram("jit_f", {c.name: c for c in collectives}, **known)


def gpu_op(op, start, end, name=None, **stats):
    return (name or op, start, end, {"hlo_op": op, "hlo_module": "jit_f"} | stats)


def profile_traces(path, *, mesh=None, cluster=None, out=None):
    """Return the report of bare traces with the traced program's predicted times, as `meshkit profile` makes it."""
    found = measure_traces(path, TracedJob(mesh, cluster))
    return found.write(out, found.price())
