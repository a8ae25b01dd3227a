"""gpt-oss in Modular's MAX with its experts in packed MXFP4: kernels in Mojo, and an architecture for `max serve`.

`max serve --custom-architectures ROOT:spark_mxfp4.max.architecture` loads `architecture`; `kernels/` is the Mojo
package. Both need Modular's `max`, which spark_mxfp4 does not require; nothing is imported here.
"""
