// Matrix products whose result has another type than the factors. The CPU has no kernels for these.

#include <ATen/ATen.h>

#include "own.h"

namespace operators {

namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;

Tensor mm(const Tensor& self, const Tensor& other, ScalarType type) {
  return at::mm(self.to(type), other.to(type));
}
Tensor& mm_out(const Tensor& self, const Tensor& other, ScalarType type, Tensor& out) {
  return at::mm_out(out, self.to(type), other.to(type));
}
Tensor bmm(const Tensor& self, const Tensor& other, ScalarType type) {
  return at::bmm(self.to(type), other.to(type));
}
Tensor& bmm_out(const Tensor& self, const Tensor& other, ScalarType type, Tensor& out) {
  return at::bmm_out(out, self.to(type), other.to(type));
}
Tensor addmm(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type, const Scalar& beta,
             const Scalar& alpha) {
  return at::addmm(self.to(type), left.to(type), right.to(type), beta, alpha);
}
Tensor& addmm_out(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type,
                  const Scalar& beta, const Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, self.to(type), left.to(type), right.to(type), beta, alpha);
}
Tensor baddbmm(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type,
               const Scalar& beta, const Scalar& alpha) {
  return at::baddbmm(self.to(type), left.to(type), right.to(type), beta, alpha);
}
Tensor& baddbmm_out(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type,
                    const Scalar& beta, const Scalar& alpha, Tensor& out) {
  return at::baddbmm_out(out, self.to(type), left.to(type), right.to(type), beta, alpha);
}

}  // namespace

OwnKernels matrix_kernels() {
  return {{"mm.dtype", host_kernel(mm)},           {"mm.dtype_out", host_kernel(mm_out)},
          {"bmm.dtype", host_kernel(bmm)},         {"bmm.dtype_out", host_kernel(bmm_out)},
          {"addmm.dtype", host_kernel(addmm)},     {"addmm.dtype_out", host_kernel(addmm_out)},
          {"baddbmm.dtype", host_kernel(baddbmm)}, {"baddbmm.dtype_out", host_kernel(baddbmm_out)}};
}

}  // namespace operators
