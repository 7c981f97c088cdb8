#include "worker/cuda_matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

namespace zipage {
namespace {

absl::Status CublasError(const char* what, cublasStatus_t status) {
  return absl::InternalError(
      absl::StrCat("cuBLASLt: ", what, ": ", cublasLtGetStatusString(status)));
}

cudaDataType DataType(DType dtype) { return dtype == DType::kFloat32 ? CUDA_R_32F : CUDA_R_16BF; }

// Bytes that a pointer is a multiple of, as far as algorithms care.
uint32_t Alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(std::min<uintptr_t>(256, address & (~address + 1)));
}

// Descriptors of a product and the algorithm for it. Column-major, as cuBLASLt sees it: y^T [out,
// rows] = w [out, in] * x^T [in, rows], w and x^T being stored with `in` contiguous.
struct Operation {
  cublasLtMatmulDesc_t matmul = nullptr;
  cublasLtMatrixLayout_t w = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t y = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};

  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (matmul != nullptr) cublasLtMatmulDescDestroy(matmul);
    for (cublasLtMatrixLayout_t layout : {w, x, y}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
  }
};

using OperationKey = std::tuple<int64_t, int64_t, int64_t, DType, DType, bool, uint32_t, uint32_t>;

}  // namespace

struct CudaMatmul::Impl {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  absl::flat_hash_map<OperationKey, std::unique_ptr<Operation>> operations;

  ~Impl() {
    operations.clear();
    if (handle != nullptr) cublasLtDestroy(handle);
  }
  absl::StatusOr<Operation*> Find(const CudaProduct& p);
  absl::Status Describe(const CudaProduct& p, Operation* operation) const;
  absl::Status ChooseAlgorithm(const CudaProduct& p, Operation* operation) const;
};

absl::Status CudaMatmul::Impl::Describe(const CudaProduct& p, Operation* operation) const {
  const cudaDataType type = DataType(p.dtype);
  const cudaDataType out_type = DataType(p.out_dtype);
  cublasStatus_t status =
      cublasLtMatmulDescCreate(&operation->matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  if (status != CUBLAS_STATUS_SUCCESS) return CublasError("descriptor", status);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    if (status != CUBLAS_STATUS_SUCCESS) return;
    status = cublasLtMatmulDescSetAttribute(operation->matmul, attribute, &value, sizeof(value));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (p.bias != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out_type);
  }
  const auto layout = [&](cublasLtMatrixLayout_t* to, cudaDataType element, int64_t rows,
                          int64_t columns) {
    if (status != CUBLAS_STATUS_SUCCESS) return;
    status = cublasLtMatrixLayoutCreate(to, element, rows, columns, rows);
  };
  layout(&operation->w, type, p.in_features, p.out_features);
  layout(&operation->x, type, p.in_features, p.rows);
  layout(&operation->y, out_type, p.out_features, p.rows);
  return status == CUBLAS_STATUS_SUCCESS ? absl::OkStatus() : CublasError("descriptor", status);
}

absl::Status CudaMatmul::Impl::ChooseAlgorithm(const CudaProduct& p, Operation* operation) const {
  cublasLtMatmulPreference_t preference = nullptr;
  cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
  if (status != CUBLAS_STATUS_SUCCESS) return CublasError("preference", status);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    if (status != CUBLAS_STATUS_SUCCESS) return;
    status = cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Alignment(p.weight));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Alignment(p.x));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Alignment(p.y));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Alignment(p.y));
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status =
        cublasLtMatmulAlgoGetHeuristic(handle, operation->matmul, operation->w, operation->x,
                                       operation->y, operation->y, preference, 1, &best, &found);
  }
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    return CublasError(absl::StrCat("no algorithm for ", p.rows, " rows times a matrix of ",
                                    p.out_features, " x ", p.in_features)
                           .c_str(),
                       status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status);
  }
  operation->algorithm = best.algo;
  return absl::OkStatus();
}

absl::StatusOr<Operation*> CudaMatmul::Impl::Find(const CudaProduct& p) {
  const OperationKey key = {p.out_features, p.in_features,     p.rows,         p.dtype,
                            p.out_dtype,    p.bias != nullptr, Alignment(p.x), Alignment(p.y)};
  std::unique_ptr<Operation>& operation = operations[key];
  if (operation == nullptr) {
    auto made = std::make_unique<Operation>();
    ZIPAGE_RETURN_IF_ERROR(Describe(p, made.get()));
    // The heuristics want a bias to be set; its address does not matter to them.
    if (p.bias != nullptr) {
      cublasLtMatmulDescSetAttribute(made->matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias,
                                     sizeof(p.bias));
    }
    ZIPAGE_RETURN_IF_ERROR(ChooseAlgorithm(p, made.get()));
    operation = std::move(made);
  }
  return operation.get();
}

CudaMatmul::CudaMatmul(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaMatmul::~CudaMatmul() = default;

absl::StatusOr<std::unique_ptr<CudaMatmul>> CudaMatmul::Create(void* workspace) {
  auto impl = std::make_unique<Impl>();
  impl->workspace = workspace;
  const cublasStatus_t status = cublasLtCreate(&impl->handle);
  if (status != CUBLAS_STATUS_SUCCESS) return CublasError("no handle", status);
  return std::unique_ptr<CudaMatmul>(new CudaMatmul(std::move(impl)));
}

absl::Status CudaMatmul::Run(const CudaProduct& p, Stream stream) {
  if (p.rows == 0) return absl::OkStatus();
  ZIPAGE_ASSIGN_OR_RETURN(Operation* const operation, impl_->Find(p));
  if (p.bias != nullptr) {
    const cublasStatus_t set = cublasLtMatmulDescSetAttribute(
        operation->matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof(p.bias));
    if (set != CUBLAS_STATUS_SUCCESS) return CublasError("bias", set);
  }
  const float one = 1;
  const float zero = 0;
  const cublasStatus_t status =
      cublasLtMatmul(impl_->handle, operation->matmul, &one, p.weight, operation->w, p.x,
                     operation->x, &zero, p.y, operation->y, p.y, operation->y,
                     &operation->algorithm, impl_->workspace, kWorkspaceBytes, stream);
  return status == CUBLAS_STATUS_SUCCESS ? absl::OkStatus() : CublasError("product", status);
}

}  // namespace zipage
