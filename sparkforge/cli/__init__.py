"""The commands of `./inv`: options, help texts, and calls into the packages that do the work."""

from invoke.collection import Collection

from sparkforge.cli import build, cluster, diagnose, maintain, measure, models, serve, service

namespace = Collection(
    serve.up,
    serve.down,
    serve.status,
    serve.logs,
    serve.chat,
    serve.run,
    serve.rollback,
    build.audit,
    models.models,
    models.pull,
    models.rm,
    models.plan,
    diagnose.doctor,
    diagnose.validate,
    maintain.clean_cache,
    maintain.test,
    maintain.check,
    list=models.list_,
)

_build = Collection("build", kernels=build.build_kernels)
_build.add_task(build.build, name="all", default=True)
_patch = Collection("patch")
_patch.add_task(build.patch_make, name="make", default=True)
_bundle = Collection("bundle", unpack=maintain.bundle_unpack)
_bundle.add_task(maintain.bundle_make, name="make", default=True)

_qualify = Collection("qualify", accept=diagnose.qualify_accept)
_qualify.add_task(diagnose.qualify, name="run", default=True)

for _collection in (
    _build,
    _patch,
    Collection("service", service.install, service.remove),
    Collection(
        "cluster",
        discover=cluster.cluster_discover,
        check=cluster.cluster_check,
        sync=cluster.cluster_sync,
        up=cluster.cluster_up,
        status=cluster.cluster_status,
        logs=cluster.cluster_logs,
        down=cluster.cluster_down,
    ),
    Collection("dev", build=build.dev_build),
    Collection(
        "image",
        verify=build.image_verify,
        sbom=build.image_sbom,
        sign=build.image_sign,
        publish=build.image_publish,
        pull=build.image_pull,
    ),
    Collection(
        "bench",
        measure.acc,
        measure.perf,
        measure.submit,
        measure.compare,
        measure.bakeoff,
        measure.profile,
    ),
    _bundle,
    _qualify,
    Collection("pins", lock=maintain.pins_lock),
    Collection("max", up=serve.max_up),
):
    namespace.add_collection(_collection)
