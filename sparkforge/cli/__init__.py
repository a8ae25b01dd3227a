"""The commands of `./inv`: options, help texts, and calls into the packages that do the work."""

from invoke.collection import Collection

from sparkforge.cli import build, cluster, diagnose, maintain, measure, models, serve

namespace = Collection(
    *(serve.up, serve.down, serve.status, serve.logs, serve.chat, serve.run, serve.rollback, build.audit),
    *(models.models, models.pull, models.rm, models.plan, diagnose.doctor, diagnose.validate),
    *(maintain.clean_cache, maintain.test, maintain.check),
    list=models.list_,
)
COLLECTIONS = {
    "build": (build.build_kernels, build.build),
    "patch": (build.patch_make,),
    "service": (serve.service_install, serve.service_remove),
    "cluster": (
        *(cluster.cluster_discover, cluster.cluster_check, cluster.cluster_sync, cluster.cluster_up),
        *(cluster.cluster_status, cluster.cluster_logs, cluster.cluster_down),
    ),
    "dev": (build.dev_build,),
    "image": (build.image_verify, build.image_sbom, build.image_sign, build.image_publish, build.image_pull),
    "bench": (measure.acc, measure.perf, measure.submit, measure.compare, measure.bakeoff, measure.profile),
    "bundle": (maintain.bundle_unpack, maintain.bundle_make),
    "qualify": (diagnose.qualify_accept, diagnose.qualify),
    "pins": (maintain.pins_lock,),
    "max": (serve.max_up,),
}
# Collection → the name of its last task, which also runs if only the collection is named.
DEFAULTS = {"build": "all", "patch": "make", "bundle": "make", "qualify": "run"}

for _name, _tasks in COLLECTIONS.items():
    _collection = Collection(_name)
    for _task in _tasks:
        _is_default = _name in DEFAULTS and _task is _tasks[-1]
        _own_name = DEFAULTS[_name] if _is_default else _task.name.removeprefix(f"{_name}_")
        _collection.add_task(_task, name=_own_name, default=_is_default)
    namespace.add_collection(_collection)
